"""``attnres_compile::inter_block``: phase 1, all reads of a block over the finished blocks at once."""

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
    "inter_block(Tensor[] blocks, Tensor queries, Tensor? key_norms, float eps) -> (Tensor o, Tensor m, Tensor l)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def inter_block(
    blocks: Sequence[Tensor], queries: Tensor, key_norms: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Phase 1 of the two-phase computation (arXiv 2603.15031): the queries do not depend on the input.

    With ``s_ki = <queries_k, key_norms_k * RMSNorm(b_i)>``: ``m_k = max_i s_ki``,
    ``l_k = sum_i exp(s_ki - m_k)``, ``o_k = sum_i exp(s_ki - m_k) b_i``, in one pass over the blocks.
    Autograd keeps references to the inputs and recomputes the statistics.

    Args:
        blocks: ``n >= 1`` tensors ``[..., d]`` of one shape and dtype, any strides.
        queries: pseudo-queries of the block's ``S`` reads, ``[S, d]``.
        key_norms: weights of the keys' RMSNorm ``[S, d]``, or None for ones.
        eps: added to the mean square.

    Returns:
        ``o [S, ..., d]``, ``m [S, ...]``, ``l [S, ...]``, all fp32 (fp64 for fp64 blocks).
    """
    o, m, l = torch.ops.attnres_compile.inter_block(list(blocks), queries, key_norms, eps)
    return o, m, l


def _exponentials(xs: Sequence[Tensor], keys: Tensor, eps: float) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    rs = [inverse_rms(x, eps) for x in xs]
    dots = [torch.movedim(x @ keys.T, -1, 0) for x in xs]
    logits = torch.stack([r * z for r, z in zip(rs, dots, strict=True)])
    m = logits.amax(0)
    return rs, dots, logits, m


@without_autocast
def _forward(
    blocks: list[Tensor], queries: Tensor, key_norms: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(blocks[0].dtype)
    xs = [b.to(dtype) for b in blocks]
    _, _, logits, m = _exponentials(xs, key_vector(queries, key_norms, dtype), eps)
    e = (logits - m).exp()
    o = torch.mul(xs[0], e[0].unsqueeze(-1)).contiguous()
    for x, weight in zip(xs[1:], e[1:], strict=True):
        o.addcmul_(x, weight.unsqueeze(-1))
    return o, m.contiguous(), e.sum(0).contiguous()


LIBRARY.impl("inter_block", _forward, "CompositeExplicitAutograd")


def _fake(blocks: list[Tensor], queries: Tensor, key_norms: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    shape, dtype, device = blocks[0].shape, compute_dtype(blocks[0].dtype), blocks[0].device
    o = torch.empty((queries.shape[0], *shape), dtype=dtype, device=device)
    m, l = (torch.empty((queries.shape[0], *shape[:-1]), dtype=dtype, device=device) for _ in range(2))
    return o, m, l


torch.library.register_fake("attnres_compile::inter_block", _fake, lib=LIBRARY)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    blocks, queries, key_norms, ctx.eps = inputs
    ctx.save_for_backward(queries, key_norms, *blocks)


@without_autocast
def _backward(
    ctx: Any, grad_o: Tensor, grad_m: Tensor, grad_l: Tensor
) -> tuple[list[Tensor], Tensor, Tensor | None, None]:
    queries, key_norms, *blocks = ctx.saved_tensors
    dtype = compute_dtype(blocks[0].dtype)
    xs = [b.to(dtype) for b in blocks]
    keys = key_vector(queries, key_norms, dtype)
    rs, dots, logits, m = _exponentials(xs, keys, ctx.eps)
    e = (logits - m).exp()
    grad_logits = e * (torch.stack([(grad_o * x).sum(-1) for x in xs]) + grad_l)
    # o and l fall when m rises; m follows its largest logit.
    largest = torch.nn.functional.one_hot(logits.argmax(0), len(xs)).movedim(-1, 0)
    grad_logits = grad_logits + largest * (grad_m - grad_logits.sum(0))
    grads, grad_keys = [], torch.zeros_like(keys)
    for block, x, r, z, weight, ds in zip(blocks, xs, rs, dots, e, grad_logits, strict=True):
        through_sum = (weight.unsqueeze(-1) * grad_o).sum(0)
        grads.append((through_sum + source_gradient(x, keys, r, z, ds)).to(block.dtype))
        grad_keys = grad_keys + key_gradient(x, r, ds)
    return grads, *split_key_gradient(grad_keys, queries, key_norms), None


torch.library.register_autograd("attnres_compile::inter_block", _backward, setup_context=_setup_context, lib=LIBRARY)
