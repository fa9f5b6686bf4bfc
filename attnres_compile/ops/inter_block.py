"""``attnres_compile::inter_block``: phase 1, all reads of a block over the finished blocks at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnres_compile.ops._library import define, differentiate, kernels, key_vector, once, split_key_gradient
from attnres_compile.ops.factored import compute_dtype

OPS = torch.ops.attnres_compile


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
    o, m, l = OPS.inter_block(list(blocks), queries, key_norms, eps)
    return o, m, l


def phase_one_sum(blocks: Sequence[Tensor], query: Tensor, key_norm: Tensor | None, eps: float) -> Tensor:
    """The ``o [..., d]`` of one read, which the backward of a fused operator makes again instead of keeping it."""
    key_norms = None if key_norm is None else key_norm.unsqueeze(0)
    return inter_block(blocks, query.unsqueeze(0), key_norms, eps)[0].squeeze(0)


def _forward(
    blocks: list[Tensor], queries: Tensor, key_norms: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    keys = key_vector(queries, key_norms, compute_dtype(blocks[0].dtype))
    result: tuple[Tensor, Tensor, Tensor] = kernels(blocks[0]).inter_block(blocks, keys, eps)
    return result


def _fake(blocks: list[Tensor], queries: Tensor, key_norms: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    shape, dtype, device = blocks[0].shape, compute_dtype(blocks[0].dtype), blocks[0].device
    o = torch.empty((queries.shape[0], *shape), dtype=dtype, device=device)
    m, l = (torch.empty((queries.shape[0], *shape[:-1]), dtype=dtype, device=device) for _ in range(2))
    return o, m, l


def _first_derivative(
    grad_o: Tensor,
    grad_m: Tensor,
    grad_l: Tensor,
    blocks: list[Tensor],
    queries: Tensor,
    key_norms: Tensor | None,
    eps: float,
) -> tuple[list[Tensor], Tensor]:
    keys = key_vector(queries, key_norms, compute_dtype(blocks[0].dtype))
    backward = kernels(grad_o).inter_block_backward
    result: tuple[list[Tensor], Tensor] = backward(grad_o, grad_m, grad_l, blocks, keys, eps)
    return result


def _fake_first_derivative(
    grad_o: Tensor,
    grad_m: Tensor,
    grad_l: Tensor,
    blocks: list[Tensor],
    queries: Tensor,
    key_norms: Tensor | None,
    eps: float,
) -> tuple[list[Tensor], Tensor]:
    grads = [torch.empty(b.shape, dtype=b.dtype, device=b.device) for b in blocks]
    return grads, torch.empty(queries.shape, dtype=grad_o.dtype, device=queries.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    blocks, queries, key_norms, ctx.eps = inputs
    ctx.save_for_backward(queries, key_norms, *blocks)


def _backward(
    ctx: Any, grad_o: Tensor, grad_m: Tensor, grad_l: Tensor
) -> tuple[list[Tensor], Tensor, Tensor | None, None]:
    queries, key_norms, *blocks = ctx.saved_tensors
    grads, grad_keys = OPS.inter_block_backward(grad_o, grad_m, grad_l, blocks, queries, key_norms, ctx.eps)
    return grads, *split_key_gradient(grad_keys, queries, key_norms), None


_INPUTS = "Tensor[] blocks, Tensor queries, Tensor? key_norms, float eps"
define(f"inter_block({_INPUTS}) -> (Tensor o, Tensor m, Tensor l)", _forward, _fake)
define(
    f"inter_block_backward(Tensor grad_o, Tensor grad_m, Tensor grad_l, {_INPUTS})"
    " -> (Tensor[] grads, Tensor grad_keys)",
    _first_derivative,
    _fake_first_derivative,
)
differentiate("inter_block", _setup_context, _backward)
once("inter_block_backward")
