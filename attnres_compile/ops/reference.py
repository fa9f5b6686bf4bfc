"""The equations of Attention Residuals (arXiv 2603.15031) in plain PyTorch: the truth for all tests.

Any floating dtype: fp16 and bf16 are computed in fp32 and cast once at the end, fp32 and fp64 in themselves.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor


def depth_attention(
    sources: Sequence[Tensor], query: Tensor, key_norm: Tensor | None, *, eps: float, scale: float = 1.0
) -> Tensor:
    """Attention over depth: ``h = scale * sum_i softmax_i(<query, key_norm * RMSNorm(v_i)>) v_i``.

    ``sources`` are n tensors ``[..., d]``, ``query`` and ``key_norm`` are ``[d]``. Returns ``[..., d]`` in the sources'
    dtype.
    """
    stacked = torch.stack(list(sources))
    values = _compute(stacked)
    weights = _logits(values, query, key_norm, eps).softmax(0)
    return (scale * (weights.unsqueeze(-1) * values).sum(0)).to(stacked.dtype)


def inter_block(
    blocks: Sequence[Tensor], queries: Tensor, key_norms: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Phase 1 of the two-phase computation: all S reads of one block attend to the n finished blocks at once.

    ``blocks`` are n tensors ``[..., d]``, ``queries`` and ``key_norms`` are ``[S, d]``. Returns, in the compute
    dtype, the sums ``o [S, ..., d]`` of ``exp(logit - m) v``, the largest logits ``m [S, ...]`` and the sums
    ``l [S, ...]`` of ``exp(logit - m)``.
    """
    values = _compute(torch.stack(list(blocks)))
    logits = torch.stack([_logits(values, *row, eps) for row in _rows(queries, key_norms)])
    m = logits.amax(1)
    weights = (logits - m.unsqueeze(1)).exp()
    return (weights.unsqueeze(-1) * values).sum(1), m, weights.sum(1)


def merge(
    o: Tensor,
    m: Tensor,
    l: Tensor,
    partial: Tensor | None,
    query: Tensor,
    key_norm: Tensor | None,
    *,
    eps: float,
    scale: float,
) -> Tensor:
    """Phase 2: online softmax of one read of phase 1 with the one remaining source, the open block's partial sum.

    ``o`` and ``partial`` are ``[..., d]``, ``m`` and ``l`` are ``[...]``, ``query`` and ``key_norm`` are ``[d]``.
    Without a partial sum this is ``scale * o / l``. Returns ``[..., d]`` in the dtype of ``partial``, else of ``o``.
    """
    if partial is None:
        return scale * o / l.unsqueeze(-1)
    value = _compute(partial)
    logit = _logits(value, query, key_norm, eps)
    top = torch.maximum(m, logit)
    old, new = (m - top).exp(), (logit - top).exp()
    total = old.unsqueeze(-1) * o + new.unsqueeze(-1) * value
    return (scale * total / (old * l + new).unsqueeze(-1)).to(partial.dtype)


def block_attnres(
    source: Tensor,
    sublayers: Sequence[Callable[[Tensor], Tensor]],
    queries: Tensor,
    key_norms: Tensor | None,
    blocks: Sequence[int],
    *,
    eps: float,
    preserve: bool,
) -> Tensor:
    """Block AttnRes: a sublayer reads the source, the sums of the finished blocks and the open block's partial sum.

    ``source`` is ``[..., d]``, ``queries`` and ``key_norms`` are ``[L, d]`` for L sublayers, ``blocks`` are the blocks'
    sizes in sublayers; ``[1] * L`` is Full AttnRes. The first sublayer reads the source itself; the state after r
    sublayers is read with row r - 1, the last such read is the result. ``preserve`` multiplies a read by its
    number of sources.
    """
    if sum(blocks) != len(sublayers):
        raise ValueError(f"blocks {list(blocks)} do not add up to {len(sublayers)} sublayers")
    ends = set(accumulate(blocks))
    hidden, closed, partial = source, [source], list[Tensor]()
    for done, (sublayer, row) in enumerate(zip(sublayers, _rows(queries, key_norms), strict=True), 1):
        output = sublayer(hidden)
        partial = [partial[0] + output] if partial else [output]
        sources = closed + partial
        hidden = depth_attention(sources, *row, eps=eps, scale=len(sources) if preserve else 1.0)
        if done in ends:
            closed, partial = sources, []
    return hidden


def _rows(queries: Tensor, key_norms: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    norms = [None] * len(queries) if key_norms is None else list(key_norms)
    return list(zip(queries, norms, strict=True))


def _compute(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _logits(values: Tensor, query: Tensor, key_norm: Tensor | None, eps: float) -> Tensor:
    keys = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    if key_norm is not None:
        keys = keys * key_norm.to(keys.dtype)
    return keys @ query.to(keys.dtype)
