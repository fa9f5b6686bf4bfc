"""``attnres_compile::merge_norm``: a read and the norm after it, where no residual add comes before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnres_compile.ops import factored
from attnres_compile.ops._library import define, differentiate, kernels, key_vector, split_key_gradient
from attnres_compile.ops.add_merge_norm import Norm
from attnres_compile.ops.inter_block import phase_one_sum

OPS = torch.ops.attnres_compile


def merge_norm(
    blocks: Sequence[Tensor],
    o: Tensor,
    m: Tensor,
    l: Tensor,
    partial: Tensor | None,
    query: Tensor,
    key_norm: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm_eps: float,
    scale: float,
    norm: Norm,
) -> Tensor:
    """RMSNorm or LayerNorm of ``merge(o, m, l, partial, ...)``: a block's first and second read, before any add.

    fp32 inside (fp64 for fp64), one cast at the end. Autograd keeps references to the finished blocks and the partial
    sum, and per-token statistics; ``o`` and the read are recomputed.

    Args:
        blocks: the finished blocks that ``o``, ``m`` and ``l`` were computed from, ``[..., d]`` each.
        o: unnormalised sum of the finished blocks ``[..., d]``, a row of ``inter_block``'s.
        m: largest logit ``[...]``.
        l: sum of exponentials ``[...]``.
        partial: the block's running sum ``[..., d]``; None for a block's first read.
        query: pseudo-query of the read ``[d]``.
        key_norm: weight of the keys' RMSNorm ``[d]``, or None for ones.
        weight: of the norm ``[d]``, or None for ones.
        bias: of the norm ``[d]``, or None for zeros.
        eps: added to the mean square of the keys.
        norm_eps: added to the mean square (RMSNorm) or variance (LayerNorm) of the norm.
        scale: factor of the read.
        norm: ``"rms"`` or ``"layer"``.

    Returns:
        The normalised read ``[..., d]`` in the blocks' dtype.
    """
    parameters = (query, key_norm, weight, bias, eps, norm_eps, scale, norm)
    result: Tensor = OPS.merge_norm(list(blocks), o, m, l, partial, *parameters)
    return result


def _forward(
    blocks: list[Tensor],
    o: Tensor,
    m: Tensor,
    l: Tensor,
    partial: Tensor | None,
    query: Tensor,
    key_norm: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm_eps: float,
    scale: float,
    norm: str,
) -> Tensor:
    if partial is None:
        h = o * (scale / l).unsqueeze(-1)
    else:
        # In the compute dtype: the norm takes the read before any cast.
        h = kernels(o).merge(o, m, l, partial.to(o.dtype), key_vector(query, key_norm, o.dtype), eps, scale)
    return factored.normalise(h, weight, bias, norm_eps, norm == "layer").to(blocks[0].dtype)


def _fake(blocks: list[Tensor], *_: Any) -> Tensor:
    return torch.empty(blocks[0].shape, dtype=blocks[0].dtype, device=blocks[0].device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    blocks, _, m, l, partial, query, key_norm, weight, bias, *ctx.options = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(m, l, partial, query, key_norm, weight, *blocks)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    m, l, partial, query, key_norm, weight, *blocks = ctx.saved_tensors
    eps, norm_eps, scale, norm = ctx.options
    o = phase_one_sum(blocks, query, key_norm, eps)
    merged: tuple[Tensor | None, ...]
    if partial is None:
        h = o * (scale / l).unsqueeze(-1)
        found = factored.normalise_backward(grad.to(o.dtype), h, weight, norm_eps, norm == "layer")
        grad_h, along_h, grad_weight, grad_bias = found
        merged = (grad_h * (scale / l).unsqueeze(-1), None, -along_h / l, None, None, None)
    else:
        saved = (partial, o, m, l, query, key_norm, weight)
        found = OPS.add_merge_norm_backward(None, grad, *saved, eps, norm_eps, scale, norm)
        grad_o, grad_m, grad_l, grad_partial, grad_key, grad_weight, grad_bias = found
        merged = (grad_o, grad_m, grad_l, grad_partial, *split_key_gradient(grad_key, query, key_norm))
    return (
        [None] * len(blocks),
        *merged,
        None if weight is None else grad_weight.to(weight.dtype),
        None if ctx.bias_dtype is None else grad_bias.to(ctx.bias_dtype),
        *[None] * 4,
    )


define(
    "merge_norm(Tensor[] blocks, Tensor o, Tensor m, Tensor l, Tensor? partial, Tensor query, Tensor? key_norm,"
    " Tensor? weight, Tensor? bias, float eps, float norm_eps, float scale, str norm) -> Tensor",
    _forward,
    _fake,
)
differentiate("merge_norm", _setup_context, _backward)
