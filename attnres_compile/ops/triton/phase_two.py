"""Phase 2, the partial sum merged into a read: ``merge`` and its backward, a program for each tile of rows."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnres_compile.ops.triton.launch import on, programs, rows_of, tile
from attnres_compile.ops.triton.rows import products, rms_and_dot, source_gradient


def merge(o: Tensor, m: Tensor, l: Tensor, partial: Tensor, key: Tensor, eps: float, scale: float) -> Tensor:
    """See ``factored.merge``."""
    out = torch.empty(partial.shape, dtype=partial.dtype, device=partial.device)
    if not out.numel():
        return out
    x, o, d = rows_of(partial), rows_of(o), partial.shape[-1]
    size = tile(d)
    with on(out.device):
        _forward[(size.count(len(x)),)](
            o,
            o.stride(0),
            m.contiguous(),
            l.contiguous(),
            x,
            x.stride(0),
            key.contiguous(),
            out,
            len(x),
            eps,
            scale,
            d,
            size.columns,
            size.rows,
            num_warps=size.warps,
        )
    return out


def merge_backward(
    grad: Tensor, o: Tensor, m: Tensor, l: Tensor, partial: Tensor, key: Tensor, eps: float, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See ``factored.merge_backward``."""
    grad_o, grad_m, grad_l, grad_partial = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (o, m, l, partial)
    )
    if not grad.numel():
        return grad_o, grad_m, grad_l, grad_partial, torch.zeros_like(key)
    g, x, o, d = rows_of(grad), rows_of(partial), rows_of(o), partial.shape[-1]
    size = tile(d)
    with on(grad.device):
        count = programs(grad.device, size.count(len(x)), size.warps)
        grad_keys = key.new_empty(count, d)
        _backward[(count,)](
            g,
            g.stride(0),
            o,
            o.stride(0),
            m.contiguous(),
            l.contiguous(),
            x,
            x.stride(0),
            key.contiguous(),
            grad_o,
            grad_m,
            grad_l,
            grad_partial,
            grad_keys,
            len(x),
            eps,
            scale,
            d,
            size.columns,
            size.rows,
            num_warps=size.warps,
        )
    return grad_o, grad_m, grad_l, grad_partial, grad_keys.sum(0)


@triton.jit
def coefficients(x, k, m, l, valid, eps, D):
    """Weights of ``o`` and of the partial sum ``x [rows, d]``, its ``1/rms`` and ``<x, k>``; zeros past the end."""
    r, z = rms_and_dot(x, k, eps, D)
    s = r * z
    largest = tl.maximum(m, s)
    of_blocks, of_partial = tl.exp(m - largest), tl.exp(s - largest)
    total = of_blocks * l + of_partial
    # Rows past the end would be NaN with an eps of zero, and reach the sums over rows.
    return tl.where(valid, of_blocks / total, 0.0), tl.where(valid, of_partial / total, 0.0), tl.where(valid, r, 0.0), z


@triton.jit
def scalar_gradients(l, of_blocks, of_partial, r, along_o, along_x, along_h):
    """Gradients ``[rows]`` of ``m``, ``l`` and ``<x, k>``.

    ``along_o``, ``along_x`` and ``along_h`` are the products of the mix's gradient with ``o``, ``x`` and the mix.
    """
    return of_blocks * (along_o - l * along_h), -of_blocks * along_h, of_partial * (along_x - along_h) * r


@triton.jit(do_not_specialize=["rows"])
def _forward(
    o_in,
    o_stride,
    m_in,
    l_in,
    partial,
    partial_stride,
    key,
    out,
    rows,
    eps,
    scale,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    valid = row < rows
    inside = valid[:, None] & (column < D)
    x = tl.load(partial + row[:, None] * partial_stride + column, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(o_in + row[:, None] * o_stride + column, mask=inside, other=0.0)
    k = tl.load(key + column, mask=column < D, other=0.0)
    m, l = tl.load(m_in + row, mask=valid, other=0.0), tl.load(l_in + row, mask=valid, other=0.0)
    of_blocks, of_partial, _, _ = coefficients(x, k, m, l, valid, eps, D)
    h = (of_blocks * scale)[:, None] * o + (of_partial * scale)[:, None] * x
    tl.store(out + row[:, None] * D + column, h.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad,
    grad_stride,
    o_in,
    o_stride,
    m_in,
    l_in,
    partial,
    partial_stride,
    key,
    grad_o,
    grad_m,
    grad_l,
    grad_partial,
    grad_keys,
    rows,
    eps,
    scale,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)[None, :]
    k = tl.load(key + column, mask=column < D, other=0.0)
    grad_key = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(first, tl.int64) * ROWS + tl.arange(0, ROWS)
        valid = row < rows
        inside = valid[:, None] & (column < D)
        x = tl.load(partial + row[:, None] * partial_stride + column, mask=inside, other=0.0).to(tl.float32)
        o = tl.load(o_in + row[:, None] * o_stride + column, mask=inside, other=0.0)
        g = tl.load(grad + row[:, None] * grad_stride + column, mask=inside, other=0.0).to(tl.float32) * scale
        m, l = tl.load(m_in + row, mask=valid, other=0.0), tl.load(l_in + row, mask=valid, other=0.0)
        of_blocks, of_partial, r, z = coefficients(x, k, m, l, valid, eps, D)
        along_o, along_x = products(g, o, x)
        along_h = of_blocks * along_o + of_partial * along_x
        of_m, of_l, grad_dot = scalar_gradients(l, of_blocks, of_partial, r, along_o, along_x, along_h)
        of_x = source_gradient(g, of_partial, x, k, r, z, grad_dot, D)
        place = row[:, None] * D + column
        tl.store(grad_o + place, of_blocks[:, None] * g, mask=inside)
        tl.store(grad_m + row, of_m, mask=valid)
        tl.store(grad_l + row, of_l, mask=valid)
        tl.store(grad_partial + place, of_x.to(grad_partial.dtype.element_ty), mask=inside)
        grad_key += grad_dot[:, None] * x
    total = tl.sum(grad_key, axis=0)[None, :]
    tl.store(grad_keys + tl.program_id(0) * D + column, total, mask=column < D)
