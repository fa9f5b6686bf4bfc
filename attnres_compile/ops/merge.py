"""``attnres_compile::merge``: phase 2, the partial sum joins the finished blocks by online softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnres_compile.ops._library import define, differentiate, kernels, key_vector, once, split_key_gradient

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
) -> Tensor:
    """Phase 2 of the two-phase computation (arXiv 2603.15031): one read from its phase-1 statistics.

    With ``s = <query, key_norm * RMSNorm(partial)>`` and ``m' = max(m, s)``:
    ``h = scale * (exp(m - m') o + exp(s - m') partial) / (exp(m - m') l + exp(s - m'))``.
    Autograd keeps references to the inputs and recomputes the statistics.

    Args:
        o: unnormalised sum of the finished blocks, ``[..., d]``, a row of ``inter_block``'s.
        m: largest logit ``[...]``.
        l: sum of exponentials ``[...]``.
        partial: the block's running sum ``[..., d]``; None for a block's first read, then ``h = scale * o / l``.
        query: pseudo-query ``[d]``; may be None without a partial sum.
        key_norm: weight of the keys' RMSNorm ``[d]``, or None for ones.
        eps: added to the mean square.
        scale: factor of the result; the number of sources makes zero queries reproduce the plain sum.

    Returns:
        ``[..., d]`` in the partial sum's dtype, in that of ``o`` without one.
    """
    result: Tensor = OPS.merge(o, m, l, partial, query, key_norm, eps, scale)
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
    o, m, l, partial, query, key_norm, ctx.eps, ctx.scale = inputs
    ctx.save_for_backward(o, m, l, partial, query, key_norm)


def _backward(
    ctx: Any, grad: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None, None, None]:
    o, m, l, partial, query, key_norm = ctx.saved_tensors
    if partial is None:
        g = grad * ctx.scale
        return g / l.unsqueeze(-1), None, -(g * o).sum(-1) / l.square(), None, None, None, None, None
    found = OPS.merge_backward(grad, o, m, l, partial, query, key_norm, ctx.eps, ctx.scale)
    grad_o, grad_m, grad_l, grad_partial, grad_key = found
    return grad_o, grad_m, grad_l, grad_partial, *split_key_gradient(grad_key, query, key_norm), None, None


define(
    "merge(Tensor o, Tensor m, Tensor l, Tensor? partial, Tensor? query, Tensor? key_norm, float eps, float scale)"
    " -> Tensor",
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
