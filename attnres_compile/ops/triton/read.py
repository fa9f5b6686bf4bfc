"""One read of the stream: ``depth_attention`` and its backward, a program for each tile of rows."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnres_compile.ops.triton.launch import on, programs, result, rows_of, source, table, tile
from attnres_compile.ops.triton.rows import rms_and_dot, softmax_step, source_gradient


def depth_attention(sources: Sequence[Tensor], key: Tensor, eps: float, scale: float) -> Tensor:
    """See ``factored.depth_attention``; the sources are read once."""
    out = torch.empty(sources[0].shape, dtype=sources[0].dtype, device=sources[0].device)
    if not out.numel():
        return out
    xs, d, key = [rows_of(v) for v in sources], out.shape[-1], key.contiguous()
    size, rows = tile(d), xs[0].shape[0]
    with on(out.device):
        entries, aligned = table(xs)
        _forward[(size.count(rows),)](
            entries, key, out, len(xs), rows, eps, scale, d, size.columns, size.rows, aligned, num_warps=size.warps
        )
    return out


def depth_attention_backward(
    grad: Tensor, sources: Sequence[Tensor], key: Tensor, eps: float, scale: float
) -> tuple[list[Tensor], Tensor]:
    """See ``factored.depth_attention_backward``; the sources are read twice, the second time from the cache."""
    grads = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in sources]
    if not grad.numel():
        return grads, torch.zeros_like(key)
    xs, g, d, key = [rows_of(v) for v in sources], rows_of(grad), grad.shape[-1], key.contiguous()
    size, rows = tile(d), g.shape[0]
    with on(grad.device):
        count = programs(grad.device, size.count(rows), size.warps)
        grad_keys = torch.empty(count, d, dtype=key.dtype, device=key.device)
        entries, aligned = table(xs, grads)
        _backward[(count,)](
            entries,
            key,
            g,
            g.stride(0),
            grad_keys,
            len(xs),
            rows,
            eps,
            scale,
            d,
            size.columns,
            size.rows,
            aligned,
            num_warps=size.warps,
        )
    return grads, grad_keys.sum(0)


@triton.jit(do_not_specialize=["n", "rows"])
def _forward(
    table,
    key,
    out,
    n,
    rows,
    eps,
    scale,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    element: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (column < D)
    k = tl.load(key + column, mask=column < D, other=0.0)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, COLUMNS], tl.float32)
    x = tl.load(source(table, 0, n, row, element, ALIGNED) + column, mask=inside, other=0.0)
    for i in range(n):
        # Asked for before the reductions, which would otherwise wait for memory at every source.
        following = source(table, tl.minimum(i + 1, n - 1), n, row, element, ALIGNED) + column
        following = tl.load(following, mask=inside & (i + 1 < n), other=0.0)
        v = x.to(tl.float32)
        r, z = rms_and_dot(v, k, eps, D)
        s = r * z
        m, l, before, now = softmax_step(m, l, s)
        o = o * before[:, None] + now[:, None] * v
        x = following
    o *= (scale / l)[:, None]
    tl.store(out + row[:, None] * D + column, o.to(element), mask=inside)


@triton.jit(do_not_specialize=["n", "rows"])
def _backward(
    table,
    key,
    grad,
    grad_stride,
    grad_keys,
    n,
    rows,
    eps,
    scale,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    element: tl.constexpr = grad.dtype.element_ty
    column = tl.arange(0, COLUMNS)[None, :]
    k = tl.load(key + column, mask=column < D, other=0.0)
    grad_key = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(first, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < D)
        g = tl.load(grad + row[:, None] * grad_stride + column, mask=inside, other=0.0).to(tl.float32) * scale
        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        along = tl.zeros([ROWS], tl.float32)
        x = tl.load(source(table, 0, n, row, element, ALIGNED) + column, mask=inside, other=0.0)
        for i in range(n):
            # After the last source comes the first one, with which the second pass starts.
            following = source(table, tl.where(i + 1 < n, i + 1, 0), n, row, element, ALIGNED) + column
            following = tl.load(following, mask=inside, other=0.0)
            v = x.to(tl.float32)
            r, z = rms_and_dot(v, k, eps, D)
            s = r * z
            m, l, before, now = softmax_step(m, l, s)
            along = along * before + now * tl.sum(g * v, axis=1)
            x = following
        along /= l
        for i in range(n):
            following = source(table, tl.minimum(i + 1, n - 1), n, row, element, ALIGNED) + column
            following = tl.load(following, mask=inside & (i + 1 < n), other=0.0)
            v = x.to(tl.float32)
            r, z = rms_and_dot(v, k, eps, D)
            weight = tl.exp(r * z - m) / l
            # Rows past the end would be NaN with an eps of zero.
            grad_dot = tl.where(row < rows, weight * (tl.sum(g * v, axis=1) - along) * r, 0.0)
            grad_v = source_gradient(g, weight, v, k, r, z, grad_dot, D)
            tl.store(result(table, i, n, row, D, element, ALIGNED) + column, grad_v.to(element), mask=inside)
            grad_key += grad_dot[:, None] * v
            x = following
    total = tl.sum(grad_key, axis=0)[None, :]
    tl.store(grad_keys + tl.program_id(0) * D + column, total, mask=column < D)
