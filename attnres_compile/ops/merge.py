"""``attnres_compile::merge``: phase 2, the partial sum joins the finished blocks by online softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnres_compile.ops._numerics import (
    LIBRARY,
    inverse_rms,
    key_gradient,
    key_vector,
    source_gradient,
    split_key_gradient,
    without_autocast,
)

LIBRARY.define(
    "merge(Tensor o, Tensor m, Tensor l, Tensor? partial, Tensor? query, Tensor? key_norm, float eps, float scale)"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


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
    result: Tensor = torch.ops.attnres_compile.merge(o, m, l, partial, query, key_norm, eps, scale)
    return result


def _coefficients(m: Tensor, l: Tensor, x: Tensor, key: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights of ``o`` and of the partial sum, and the partial sum's ``1/rms`` and ``<x, key>``."""
    r, z = inverse_rms(x, eps), x @ key
    s = r * z
    largest = torch.maximum(m, s)
    of_blocks, of_partial = (m - largest).exp(), (s - largest).exp()
    total = of_blocks * l + of_partial
    return of_blocks / total, of_partial / total, r, z


@without_autocast
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
    x = partial.to(o.dtype)
    of_blocks, of_partial, _, _ = _coefficients(m, l, x, key_vector(query, key_norm, o.dtype), eps)
    h = torch.mul(o, (of_blocks * scale).unsqueeze(-1)).contiguous()
    return h.addcmul_(x, (of_partial * scale).unsqueeze(-1)).to(partial.dtype)


LIBRARY.impl("merge", _forward, "CompositeExplicitAutograd")


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


torch.library.register_fake("attnres_compile::merge", _fake, lib=LIBRARY)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    o, m, l, partial, query, key_norm, ctx.eps, ctx.scale = inputs
    ctx.save_for_backward(o, m, l, partial, query, key_norm)


@without_autocast
def _backward(
    ctx: Any, grad: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None, None, None]:
    o, m, l, partial, query, key_norm = ctx.saved_tensors
    g = grad.to(o.dtype) * ctx.scale
    if partial is None:
        return g / l.unsqueeze(-1), None, -(g * o).sum(-1) / l.square(), None, None, None, None, None
    x, key = partial.to(o.dtype), key_vector(query, key_norm, o.dtype)
    of_blocks, of_partial, r, z = _coefficients(m, l, x, key, ctx.eps)
    along_o, along_x = (g * o).sum(-1), (g * x).sum(-1)
    along_h = of_blocks * along_o + of_partial * along_x
    grad_m = of_blocks * (along_o - l * along_h)
    grad_logit = (of_partial * (along_x - along_h)).unsqueeze(0)
    grad_partial = of_partial.unsqueeze(-1) * g + source_gradient(x, key.unsqueeze(0), r, z.unsqueeze(0), grad_logit)
    grad_query, grad_key_norm = split_key_gradient(key_gradient(x, r, grad_logit).squeeze(0), query, key_norm)
    return (
        of_blocks.unsqueeze(-1) * g,
        grad_m,
        -of_blocks * along_h,
        grad_partial.to(partial.dtype),
        grad_query,
        grad_key_norm,
        None,
        None,
    )


torch.library.register_autograd("attnres_compile::merge", _backward, setup_context=_setup_context, lib=LIBRARY)
