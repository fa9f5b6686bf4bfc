"""``attnres_compile::add_merge_norm``: a residual add, the read after it and the norm of that read, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from attnres_compile.ops._library import define, differentiate, kernels, key_vector, once, split_key_gradient
from attnres_compile.ops.inter_block import phase_one_sum

OPS = torch.ops.attnres_compile
Norm = Literal["rms", "layer"]


def add_merge_norm(
    partial: Tensor,
    branch: Tensor,
    blocks: Sequence[Tensor],
    o: Tensor,
    m: Tensor,
    l: Tensor,
    query: Tensor,
    key_norm: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm_eps: float,
    scale: float,
    norm: Norm,
) -> tuple[Tensor, Tensor]:
    """``total = partial + branch``, and RMSNorm or LayerNorm of ``merge(o, m, l, total, ...)`` (arXiv 2603.15031).

    fp32 inside (fp64 for fp64) from the sum to the norm's result, and one cast each. Autograd keeps references to
    ``total`` and the finished blocks, and per-token statistics; ``o`` and the read are recomputed, so that no source
    of the norm is kept beside the partial sum.

    Args:
        partial: the block's running sum ``[..., d]``.
        branch: the sublayer's output ``[..., d]``, of the same dtype.
        blocks: the finished blocks that ``o``, ``m`` and ``l`` were computed from, ``[..., d]`` each.
        o: unnormalised sum of the finished blocks ``[..., d]``, a row of ``inter_block``'s.
        m: largest logit ``[...]``.
        l: sum of exponentials ``[...]``.
        query: pseudo-query of the read ``[d]``.
        key_norm: weight of the keys' RMSNorm ``[d]``, or None for ones.
        weight: of the norm ``[d]``, or None for ones.
        bias: of the norm ``[d]``, or None for zeros.
        eps: added to the mean square of the keys.
        norm_eps: added to the mean square (RMSNorm) or variance (LayerNorm) of the norm.
        scale: factor of the read.
        norm: ``"rms"`` or ``"layer"``.

    Returns:
        The new partial sum and the normalised read, both ``[..., d]`` in the dtype of ``partial``.
    """
    statistics = (o, m, l, query, key_norm, weight, bias, eps, norm_eps, scale, norm)
    total, normalised = OPS.add_merge_norm(partial, branch, list(blocks), *statistics)
    return total, normalised


def _forward(
    partial: Tensor,
    branch: Tensor,
    blocks: list[Tensor],
    o: Tensor,
    m: Tensor,
    l: Tensor,
    query: Tensor,
    key_norm: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm_eps: float,
    scale: float,
    norm: str,
) -> tuple[Tensor, Tensor]:
    key = key_vector(query, key_norm, o.dtype)
    options = (eps, norm_eps, scale, norm == "layer")
    fused = kernels(o).add_merge_norm
    result: tuple[Tensor, Tensor] = fused(partial, branch, o, m, l, key, weight, bias, *options)
    return result


def _fake(partial: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    empty = [torch.empty(partial.shape, dtype=partial.dtype, device=partial.device) for _ in range(2)]
    return empty[0], empty[1]


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _first_derivative(
    grad_total: Tensor | None,
    grad_normalised: Tensor,
    total: Tensor,
    o: Tensor,
    m: Tensor,
    l: Tensor,
    query: Tensor,
    key_norm: Tensor | None,
    weight: Tensor | None,
    eps: float,
    norm_eps: float,
    scale: float,
    norm: str,
) -> Gradients:
    key = key_vector(query, key_norm, o.dtype)
    options = (eps, norm_eps, scale, norm == "layer")
    backward = kernels(o).add_merge_norm_backward
    result: Gradients = backward(grad_total, grad_normalised, total, o, m, l, key, weight, *options)
    return result


def _fake_first_derivative(
    grad_total: Tensor | None,
    grad_normalised: Tensor,
    total: Tensor,
    o: Tensor,
    m: Tensor,
    l: Tensor,
    query: Tensor,
    *_: Any,
) -> Gradients:
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (o, m, l, total)]
    vectors = [torch.empty(query.shape, dtype=o.dtype, device=o.device) for _ in range(3)]
    return grads[0], grads[1], grads[2], grads[3], vectors[0], vectors[1], vectors[2]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, blocks, _, m, l, query, key_norm, weight, bias, *ctx.options = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(output[0], m, l, query, key_norm, weight, *blocks)


def _backward(ctx: Any, grad_total: Tensor, grad_normalised: Tensor) -> tuple[Any, ...]:
    total, m, l, query, key_norm, weight, *blocks = ctx.saved_tensors
    eps, norm_eps, scale, norm = ctx.options
    o = phase_one_sum(blocks, query, key_norm, eps)
    saved = (total, o, m, l, query, key_norm, weight)
    found = OPS.add_merge_norm_backward(grad_total, grad_normalised, *saved, eps, norm_eps, scale, norm)
    grad_o, grad_m, grad_l, grad_sum, grad_key, grad_weight, grad_bias = found
    return (
        grad_sum,
        grad_sum,
        [None] * len(blocks),
        grad_o,
        grad_m,
        grad_l,
        *split_key_gradient(grad_key, query, key_norm),
        None if weight is None else grad_weight.to(weight.dtype),
        None if ctx.bias_dtype is None else grad_bias.to(ctx.bias_dtype),
        *[None] * 4,
    )


_STATISTICS = "Tensor o, Tensor m, Tensor l, Tensor query, Tensor? key_norm, Tensor? weight"
_OPTIONS = "float eps, float norm_eps, float scale, str norm"
define(
    f"add_merge_norm(Tensor partial, Tensor branch, Tensor[] blocks, {_STATISTICS}, Tensor? bias, {_OPTIONS})"
    " -> (Tensor total, Tensor normalised)",
    _forward,
    _fake,
)
define(
    f"add_merge_norm_backward(Tensor? grad_total, Tensor grad_normalised, Tensor total, {_STATISTICS}, {_OPTIONS})"
    " -> (Tensor grad_o, Tensor grad_m, Tensor grad_l, Tensor grad_sum, Tensor grad_key, Tensor grad_weight,"
    " Tensor grad_bias)",
    _first_derivative,
    _fake_first_derivative,
)
differentiate("add_merge_norm", _setup_context, _backward)
once("add_merge_norm_backward")
