"""``attnres_compile::merge``: phase 2, the partial sum joins the finished blocks by online softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnres_compile.ops._library import define, differentiate, kernels, key_vector, once, split_key_gradient
from attnres_compile.ops.inter_block import phase_one_sum

OPS = torch.ops.attnres_compile


def merge(
    o: Tensor,
    m: Tensor,
    l: Tensor,
    partial: Tensor | None,
    query: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    scale: float,
    blocks: Sequence[Tensor] | None = None,
) -> Tensor:
    """Phase 2 of the two-phase computation (arXiv 2603.15031): one read from its phase-1 statistics.

    With ``s = <query, key_norm * RMSNorm(partial)>`` and ``m' = max(m, s)``:
    ``h = scale * (exp(m - m') o + exp(s - m') partial) / (exp(m - m') l + exp(s - m'))``.
    Autograd keeps references to the inputs and recomputes the statistics. With ``blocks`` it keeps those instead of
    ``o``, which it makes again: all reads of a block share them, and each has an ``o`` of its own.

    Args:
        o: unnormalised sum of the finished blocks, ``[..., d]``, a row of ``inter_block``'s.
        m: largest logit ``[...]``.
        l: sum of exponentials ``[...]``.
        partial: the block's running sum ``[..., d]``; None for a block's first read, then ``h = scale * o / l``.
        query: pseudo-query ``[d]``; may be None with neither a partial sum nor ``blocks``.
        key_norm: weight of the keys' RMSNorm ``[d]``, or None for ones.
        eps: added to the mean square.
        scale: factor of the result; the number of sources makes zero queries reproduce the plain sum.
        blocks: the finished blocks that ``o``, ``m`` and ``l`` are of, ``[..., d]`` each; they get no gradient here.

    Returns:
        ``[..., d]`` in the partial sum's dtype, in that of ``o`` without one.
    """
    result: Tensor = OPS.merge(o, m, l, partial, query, key_norm, eps, scale, None if blocks is None else list(blocks))
    return result


def _forward(
    o: Tensor,
    m: Tensor,
    l: Tensor,
    partial: Tensor | None,
    query: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    scale: float,
    blocks: list[Tensor] | None = None,
) -> Tensor:
    if partial is None:
        return torch.mul(o, (scale / l).unsqueeze(-1)).contiguous()
    assert query is not None, "a read with a partial sum needs its pseudo-query"
    key = key_vector(query, key_norm, o.dtype)
    result: Tensor = kernels(o).merge(o, m, l, partial, key, eps, scale)
    return result


def _fake(
    o: Tensor,
    m: Tensor,
    l: Tensor,
    partial: Tensor | None,
    query: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    scale: float,
    blocks: list[Tensor] | None = None,
) -> Tensor:
    return torch.empty(o.shape, dtype=o.dtype if partial is None else partial.dtype, device=o.device)


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _first_derivative(
    grad: Tensor,
    o: Tensor,
    m: Tensor,
    l: Tensor,
    partial: Tensor,
    query: Tensor,
    key_norm: Tensor | None,
    eps: float,
    scale: float,
) -> Gradients:
    key = key_vector(query, key_norm, o.dtype)
    result: Gradients = kernels(o).merge_backward(grad, o, m, l, partial, key, eps, scale)
    return result


def _fake_first_derivative(
    grad: Tensor,
    o: Tensor,
    m: Tensor,
    l: Tensor,
    partial: Tensor,
    query: Tensor,
    key_norm: Tensor | None,
    eps: float,
    scale: float,
) -> Gradients:
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (o, m, l, partial)]
    return grads[0], grads[1], grads[2], grads[3], torch.empty(query.shape, dtype=o.dtype, device=o.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    o, m, l, partial, query, key_norm, ctx.eps, ctx.scale, blocks = inputs
    ctx.from_blocks, ctx.again = blocks is not None, None
    ctx.save_for_backward(m, l, partial, query, key_norm, *(blocks if ctx.from_blocks else (o,)))


def can_read_again(node: Any) -> bool:
    """Whether an autograd node is that of a merge that keeps its blocks."""
    return getattr(node, "from_blocks", False)


def read_again(node: Any) -> Tensor:
    """The result of a merge that keeps its blocks, made anew in the backward: nobody else has to keep it.

    Args:
        node: autograd's node of the merge, ``grad_fn`` of its result.
    """
    if node.again is None:
        m, l, partial, query, key_norm, *blocks = node.saved_tensors
        o = phase_one_sum(blocks, query, key_norm, node.eps)
        # Its own backward comes soon, and needs `o`.
        node.again = (o, OPS.merge(o, m, l, partial, query, key_norm, node.eps, node.scale))
    h: Tensor = node.again[1]
    return h


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    m, l, partial, query, key_norm, *kept = ctx.saved_tensors
    if ctx.again is not None:
        o, ctx.again = ctx.again[0], None
    else:
        o = phase_one_sum(kept, query, key_norm, ctx.eps) if ctx.from_blocks else kept[0]
    rest = (None, None, [None] * len(kept)) if ctx.from_blocks else (None, None)
    if partial is None:
        g = grad * ctx.scale
        return g / l.unsqueeze(-1), None, -(g * o).sum(-1) / l.square(), None, None, None, *rest
    found = OPS.merge_backward(grad, o, m, l, partial, query, key_norm, ctx.eps, ctx.scale)
    grad_o, grad_m, grad_l, grad_partial, grad_key = found
    return grad_o, grad_m, grad_l, grad_partial, *split_key_gradient(grad_key, query, key_norm), *rest


define(
    "merge(Tensor o, Tensor m, Tensor l, Tensor? partial, Tensor? query, Tensor? key_norm, float eps, float scale,"
    " Tensor[]? blocks=None) -> Tensor",
    _forward,
    _fake,
)
define(
    "merge_backward(Tensor grad, Tensor o, Tensor m, Tensor l, Tensor partial, Tensor query, Tensor? key_norm,"
    " float eps, float scale)"
    " -> (Tensor grad_o, Tensor grad_m, Tensor grad_l, Tensor grad_partial, Tensor grad_key)",
    _first_derivative,
    _fake_first_derivative,
)
differentiate("merge", _setup_context, _backward)
once("merge_backward")
