"""``attnres_compile::depth_attention``: one read of the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnres_compile.ops._library import define, differentiate, kernels, key_vector, once, split_key_gradient
from attnres_compile.ops.factored import compute_dtype

OPS = torch.ops.attnres_compile


def depth_attention(
    sources: Sequence[Tensor], query: Tensor, key_norm: Tensor | None, eps: float, scale: float
) -> Tensor:
    """Softmax attention over depth (arXiv 2603.15031, Full AttnRes; Block AttnRes with block sums as sources).

    ``h = scale * sum_i softmax_i(<query, key_norm * RMSNorm(v_i)>) v_i``

    Computed in factored form, source by source: neither a stack of the sources nor their keys are ever
    materialised. fp32 inside (fp64 for fp64), one cast at the end. Autograd keeps references to the inputs
    and recomputes the statistics.

    Args:
        sources: ``n >= 1`` tensors ``[..., d]`` of one shape and dtype, any strides.
        query: pseudo-query ``[d]``.
        key_norm: weight of the keys' RMSNorm ``[d]``, or None for ones.
        eps: added to the mean square.
        scale: factor of the result; the number of sources makes zero queries reproduce the plain sum.

    Returns:
        ``[..., d]`` in the sources' dtype.
    """
    result: Tensor = OPS.depth_attention(list(sources), query, key_norm, eps, scale)
    return result


def _forward(sources: list[Tensor], query: Tensor, key_norm: Tensor | None, eps: float, scale: float) -> Tensor:
    key = key_vector(query, key_norm, compute_dtype(sources[0].dtype))
    result: Tensor = kernels(sources[0]).depth_attention(sources, key, eps, scale)
    return result


def _fake(sources: list[Tensor], query: Tensor, key_norm: Tensor | None, eps: float, scale: float) -> Tensor:
    return torch.empty(sources[0].shape, dtype=sources[0].dtype, device=sources[0].device)


def _first_derivative(
    grad: Tensor, sources: list[Tensor], query: Tensor, key_norm: Tensor | None, eps: float, scale: float
) -> tuple[list[Tensor], Tensor]:
    key = key_vector(query, key_norm, compute_dtype(sources[0].dtype))
    result: tuple[list[Tensor], Tensor] = kernels(grad).depth_attention_backward(grad, sources, key, eps, scale)
    return result


def _fake_first_derivative(
    grad: Tensor, sources: list[Tensor], query: Tensor, key_norm: Tensor | None, eps: float, scale: float
) -> tuple[list[Tensor], Tensor]:
    grads = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in sources]
    return grads, torch.empty(query.shape, dtype=compute_dtype(sources[0].dtype), device=query.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    sources, query, key_norm, ctx.eps, ctx.scale = inputs
    ctx.save_for_backward(query, key_norm, *sources)


def _backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor], Tensor, Tensor | None, None, None]:
    query, key_norm, *sources = ctx.saved_tensors
    grads, grad_key = OPS.depth_attention_backward(grad, sources, query, key_norm, ctx.eps, ctx.scale)
    return grads, *split_key_gradient(grad_key, query, key_norm), None, None


_INPUTS = "Tensor[] sources, Tensor query, Tensor? key_norm, float eps, float scale"
define(f"depth_attention({_INPUTS}) -> Tensor", _forward, _fake)
define(
    f"depth_attention_backward(Tensor grad, {_INPUTS}) -> (Tensor[] grads, Tensor grad_key)",
    _first_derivative,
    _fake_first_derivative,
)
differentiate("depth_attention", _setup_context, _backward)
once("depth_attention_backward")
