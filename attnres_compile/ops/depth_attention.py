"""``attnres_compile::depth_attention``: one read of the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnres_compile.ops._numerics import (
    LIBRARY,
    compute_dtype,
    inverse_rms,
    key_gradient,
    key_vector,
    source_gradient,
    split_key_gradient,
    without_autocast,
)

LIBRARY.define(
    "depth_attention(Tensor[] sources, Tensor query, Tensor? key_norm, float eps, float scale) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


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
    result: Tensor = torch.ops.attnres_compile.depth_attention(list(sources), query, key_norm, eps, scale)
    return result


def _weights(xs: Sequence[Tensor], key: Tensor, eps: float) -> tuple[list[Tensor], list[Tensor], Tensor]:
    rs = [inverse_rms(x, eps) for x in xs]
    dots = [x @ key for x in xs]
    return rs, dots, torch.stack([r * z for r, z in zip(rs, dots, strict=True)]).softmax(0)


@without_autocast
def _forward(sources: list[Tensor], query: Tensor, key_norm: Tensor | None, eps: float, scale: float) -> Tensor:
    dtype = compute_dtype(sources[0].dtype)
    xs = [v.to(dtype) for v in sources]
    _, _, weights = _weights(xs, key_vector(query, key_norm, dtype), eps)
    weights = (weights * scale).unsqueeze(-1)
    h = torch.mul(xs[0], weights[0]).contiguous()
    for x, weight in zip(xs[1:], weights[1:], strict=True):
        h.addcmul_(x, weight)
    return h.to(sources[0].dtype)


LIBRARY.impl("depth_attention", _forward, "CompositeExplicitAutograd")


def _fake(sources: list[Tensor], query: Tensor, key_norm: Tensor | None, eps: float, scale: float) -> Tensor:
    return torch.empty(sources[0].shape, dtype=sources[0].dtype, device=sources[0].device)


torch.library.register_fake("attnres_compile::depth_attention", _fake, lib=LIBRARY)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    sources, query, key_norm, ctx.eps, ctx.scale = inputs
    ctx.save_for_backward(query, key_norm, *sources)


@without_autocast
def _backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor], Tensor, Tensor | None, None, None]:
    query, key_norm, *sources = ctx.saved_tensors
    dtype = compute_dtype(sources[0].dtype)
    xs = [v.to(dtype) for v in sources]
    key = key_vector(query, key_norm, dtype)
    rs, dots, weights = _weights(xs, key, ctx.eps)
    g = grad.to(dtype) * ctx.scale
    projected = torch.stack([(g * x).sum(-1) for x in xs])
    grad_logits = weights * (projected - (weights * projected).sum(0))
    grads, grad_key = [], torch.zeros_like(key)
    for source, x, r, z, weight, ds in zip(sources, xs, rs, dots, weights, grad_logits, strict=True):
        through_logits = source_gradient(x, key.unsqueeze(0), r, z.unsqueeze(0), ds.unsqueeze(0))
        grads.append((weight.unsqueeze(-1) * g + through_logits).to(source.dtype))
        grad_key = grad_key + key_gradient(x, r, ds.unsqueeze(0)).squeeze(0)
    return grads, *split_key_gradient(grad_key, query, key_norm), None, None


torch.library.register_autograd(
    "attnres_compile::depth_attention", _backward, setup_context=_setup_context, lib=LIBRARY
)
