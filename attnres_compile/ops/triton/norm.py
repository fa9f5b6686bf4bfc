"""Residual add, merge and the sublayer's norm in one pass: ``add_merge_norm`` and its backward."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnres_compile.ops.triton.launch import on, programs, rows_of, tile
from attnres_compile.ops.triton.phase_two import coefficients, scalar_gradients
from attnres_compile.ops.triton.rows import normalise, products, source_gradient

# Features above which three sums over rows and a row with its gradient do not fit the registers.
_MOST_HELD = 4096


def add_merge_norm(
    partial: Tensor,
    branch: Tensor,
    o: Tensor,
    m: Tensor,
    l: Tensor,
    key: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm_eps: float,
    scale: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """See ``factored.add_merge_norm``."""
    total, normalised = (torch.empty(partial.shape, dtype=partial.dtype, device=partial.device) for _ in range(2))
    if not total.numel():
        return total, normalised
    x, f, o, d = rows_of(partial), rows_of(branch), rows_of(o), partial.shape[-1]
    size = tile(d)
    with on(total.device):
        _forward[(size.count(len(x)),)](
            x,
            x.stride(0),
            f,
            f.stride(0),
            o,
            o.stride(0),
            m.contiguous(),
            l.contiguous(),
            key.contiguous(),
            None if weight is None else weight.contiguous(),
            None if bias is None else bias.contiguous(),
            total,
            normalised,
            len(x),
            eps,
            norm_eps,
            scale,
            centred,
            d,
            size.columns,
            size.rows,
            num_warps=size.warps,
        )
    return total, normalised


def add_merge_norm_backward(
    grad_total: Tensor | None,
    grad_normalised: Tensor,
    total: Tensor,
    o: Tensor,
    m: Tensor,
    l: Tensor,
    key: Tensor,
    weight: Tensor | None,
    eps: float,
    norm_eps: float,
    scale: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See ``factored.add_merge_norm_backward``."""
    d = total.shape[-1]
    grad_o, grad_m, grad_l, grad_x = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (o, m, l, total))
    if not total.numel():
        grad_key, grad_weight, grad_bias = (torch.zeros_like(key) for _ in range(3))
        return grad_o, grad_m, grad_l, grad_x, grad_key, grad_weight, grad_bias
    above = None if grad_total is None else rows_of(grad_total)
    g, x, o = rows_of(grad_normalised), rows_of(total), rows_of(o)
    size = tile(d)
    with on(total.device):
        # Twice the registers of the other kernels.
        count = programs(total.device, size.count(len(x)), 2 * size.warps)
        # Of the key, of the norm's weight and of its bias.
        vectors = key.new_empty(count, 3, d)
        _backward[(count,)](
            above,
            0 if above is None else above.stride(0),
            g,
            g.stride(0),
            x,
            x.stride(0),
            o,
            o.stride(0),
            m.contiguous(),
            l.contiguous(),
            key.contiguous(),
            None if weight is None else weight.contiguous(),
            grad_o,
            grad_m,
            grad_l,
            grad_x,
            vectors,
            len(x),
            eps,
            norm_eps,
            scale,
            centred,
            size.columns <= _MOST_HELD,
            d,
            size.columns,
            size.rows,
            num_warps=size.warps,
        )
    # Clones, since the result of an operator must not share memory with another.
    grad_key, grad_weight, grad_bias = (v.clone() for v in vectors.sum(0).unbind())
    return grad_o, grad_m, grad_l, grad_x, grad_key, grad_weight, grad_bias


@triton.jit(do_not_specialize=["rows"])
def _forward(
    partial,
    partial_stride,
    branch,
    branch_stride,
    o_in,
    o_stride,
    m_in,
    l_in,
    key,
    weight,
    bias,
    total,
    normalised,
    rows,
    eps,
    norm_eps,
    scale,
    CENTRED: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    element: tl.constexpr = total.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    valid = row < rows
    inside = valid[:, None] & (column < D)
    x = tl.load(partial + row[:, None] * partial_stride + column, mask=inside, other=0.0).to(tl.float32)
    f = tl.load(branch + row[:, None] * branch_stride + column, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(o_in + row[:, None] * o_stride + column, mask=inside, other=0.0)
    k = tl.load(key + column, mask=column < D, other=0.0)
    m, l = tl.load(m_in + row, mask=valid, other=0.0), tl.load(l_in + row, mask=valid, other=0.0)
    # The rounded sum is what later reads see.
    rounded = (x + f).to(element)
    place = row[:, None] * D + column
    tl.store(total + place, rounded, mask=inside)
    x = rounded.to(tl.float32)
    of_blocks, of_partial, _, _ = coefficients(x, k, m, l, valid, eps, D)
    h = (of_blocks * scale)[:, None] * o + (of_partial * scale)[:, None] * x
    y, _ = normalise(h, valid, inside, norm_eps, CENTRED, D)
    if weight is not None:
        y *= tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)
    tl.store(normalised + place, y.to(element), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad_total,
    grad_total_stride,
    grad_normalised,
    grad_normalised_stride,
    total,
    total_stride,
    o_in,
    o_stride,
    m_in,
    l_in,
    key,
    weight,
    grad_o,
    grad_m,
    grad_l,
    grad_x,
    vectors,
    rows,
    eps,
    norm_eps,
    scale,
    CENTRED: tl.constexpr,
    HELD: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)[None, :]
    sums = vectors + tl.program_id(0) * 3 * D + column
    grad_key = tl.zeros([ROWS, COLUMNS if HELD else 1], tl.float32)
    grad_weight, grad_bias = grad_key, grad_key
    for first in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        again = first >= tl.num_programs(0)
        row = tl.cast(first, tl.int64) * ROWS + tl.arange(0, ROWS)
        valid = row < rows
        inside = valid[:, None] & (column < D)
        place = row[:, None] * D + column
        x = tl.load(total + row[:, None] * total_stride + column, mask=inside, other=0.0).to(tl.float32)
        o = tl.load(o_in + row[:, None] * o_stride + column, mask=inside, other=0.0)
        k = tl.load(key + column, mask=column < D, other=0.0)
        m, l = tl.load(m_in + row, mask=valid, other=0.0), tl.load(l_in + row, mask=valid, other=0.0)
        of_blocks, of_partial, r, z = coefficients(x, k, m, l, valid, eps, D)
        h = (of_blocks * scale)[:, None] * o + (of_partial * scale)[:, None] * x
        y, factor = normalise(h, valid, inside, norm_eps, CENTRED, D)
        g = tl.load(grad_normalised + row[:, None] * grad_normalised_stride + column, mask=inside, other=0.0)
        g = g.to(tl.float32)
        grad_bias = _add(grad_bias, g, sums + 2 * D, again, column < D, HELD)
        grad_weight = _add(grad_weight, g * y, sums + D, again, column < D, HELD)
        if weight is not None:
            g *= tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
        along_y, along_ones = products(g, y, 1.0)
        grad_h = g - y * (along_y / D)[:, None]
        if CENTRED:
            grad_h -= (along_ones / D)[:, None]
        grad_h *= (factor * scale)[:, None]
        if not HELD:
            # Their registers were needed in between.
            x = tl.load(total + row[:, None] * total_stride + column, mask=inside, other=0.0).to(tl.float32)
            o = tl.load(o_in + row[:, None] * o_stride + column, mask=inside, other=0.0)
        along_o, along_x = products(grad_h, o, x)
        # <grad_h, h>, which the norm leaves no larger than its eps: summed up it would be rounding errors only.
        along_h = along_y * norm_eps * factor * factor
        tl.store(grad_o + place, of_blocks[:, None] * grad_h, mask=inside)
        of_m, of_l, grad_dot = scalar_gradients(l, of_blocks, of_partial, r, along_o, along_x, along_h)
        tl.store(grad_m + row, of_m, mask=valid)
        tl.store(grad_l + row, of_l, mask=valid)
        grad_key = _add(grad_key, grad_dot[:, None] * x, sums, again, column < D, HELD)
        if not HELD:
            k = tl.load(key + column, mask=column < D, other=0.0)
        of_x = source_gradient(grad_h, of_partial, x, k, r, z, grad_dot, D)
        if grad_total is not None:
            above = tl.load(grad_total + row[:, None] * grad_total_stride + column, mask=inside, other=0.0)
            of_x += above.to(tl.float32)
        tl.store(grad_x + place, of_x.to(grad_x.dtype.element_ty), mask=inside)
    if HELD:
        tl.store(sums, tl.sum(grad_key, axis=0)[None, :], mask=column < D)
        tl.store(sums + D, tl.sum(grad_weight, axis=0)[None, :], mask=column < D)
        tl.store(sums + 2 * D, tl.sum(grad_bias, axis=0)[None, :], mask=column < D)


@triton.jit
def _add(held, rows, place, again, mask, HELD: tl.constexpr):
    """Adds ``rows`` to a sum over rows: ``held``, or where registers do not suffice, in memory at ``place``."""
    if HELD:
        return held + rows
    else:
        # The barriers keep the compiler from asking for everything at once, and then spilling it.
        tl.debug_barrier()
        value = tl.sum(rows, axis=0)[None, :]
        if again:
            value += tl.load(place, mask=mask, other=0.0)
        tl.store(place, value, mask=mask)
        tl.debug_barrier()
        return held
