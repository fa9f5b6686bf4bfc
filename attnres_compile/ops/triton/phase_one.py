"""Phase 1, the finished blocks for all reads of the next one: ``inter_block`` and its backward."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnres_compile.ops.triton.launch import Tile, on, programs, result, rows_of, source, table, tile
from attnres_compile.ops.triton.rows import softmax_step

# Floats of keys that a program holds, beside as many of state.
_KEYS_HELD = 16384
# Of keys, of their gradients and of grad_o, in a program of the backward.
_HELD_BACKWARD = 4096


def inter_block(blocks: Sequence[Tensor], keys: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """See ``factored.inter_block``; a program for each row and group of up to four reads."""
    leading, S, d = blocks[0].shape[:-1], *keys.shape
    o, m, l = (keys.new_empty(S, *leading, *last) for last in ((d,), (), ()))
    if not o.numel():
        return o, m, l
    xs, keys = [rows_of(b) for b in blocks], keys.contiguous()
    rows, (group, size) = xs[0].shape[0], read_groups(S, d)
    with on(o.device):
        entries, aligned = table(xs)
        _forward[(rows * -(-S // group),)](
            entries,
            keys,
            o,
            m,
            l,
            len(xs),
            rows,
            eps,
            _element(xs[0]),
            S,
            group,
            d,
            size.columns,
            aligned,
            num_warps=size.warps,
        )
    return o, m, l


def inter_block_backward(
    grad_o: Tensor, grad_m: Tensor, grad_l: Tensor, blocks: Sequence[Tensor], keys: Tensor, eps: float
) -> tuple[list[Tensor], Tensor]:
    """See ``factored.inter_block_backward``; one kernel for the statistics, then one for the gradients."""
    grads = [torch.empty(b.shape, dtype=b.dtype, device=b.device) for b in blocks]
    if not grad_o.numel():
        return grads, torch.zeros_like(keys)
    xs, (S, d), keys = [rows_of(b) for b in blocks], keys.shape, keys.contiguous()
    grad_o, grad_m, grad_l = grad_o.contiguous(), grad_m.contiguous(), grad_l.contiguous()
    n, rows, (group, size) = len(xs), xs[0].shape[0], read_groups(S, d)
    padded = triton.next_power_of_2(S)
    # Many reads also have many scalars to hold.
    chunk = min(size.columns, _HELD_BACKWARD // padded // (2 if padded > 16 else 1))
    chunks = -(-d // chunk)
    logits, projected = keys.new_empty(n, rows, S), keys.new_empty(n, rows, S)
    inverse = keys.new_empty(n, rows)
    largest, total = keys.new_empty(rows, S), keys.new_empty(rows, S)
    position = torch.empty(rows, S, dtype=torch.int32, device=keys.device)
    statistics = logits, projected, inverse, largest, total, position
    with on(keys.device):
        entries, aligned = table(xs, grads)
        _statistics[(rows * -(-S // group),)](
            entries,
            keys,
            grad_o,
            grad_l,
            *statistics,
            n,
            rows,
            eps,
            _element(xs[0]),
            S,
            group,
            d,
            size.columns,
            aligned,
            num_warps=size.warps,
        )
        warps = min(max(padded * chunk // 512, 1), 4)
        # Twice the registers of other kernels, and all chunks of a row at once.
        count = max(1, programs(keys.device, rows * chunks, 2 * warps) // chunks)
        grad_keys = keys.new_empty(count, S, d)
        _gradients[(count * chunks,)](
            entries,
            keys,
            grad_o,
            grad_m,
            grad_l,
            *statistics,
            grad_keys,
            n,
            rows,
            _element(xs[0]),
            S,
            padded,
            d,
            chunk,
            chunks,
            aligned,
            num_warps=warps,
        )
    return grads, grad_keys.sum(0)


def read_groups(S: int, d: int) -> tuple[int, Tile]:
    """Reads per program, and the program's tile."""
    columns = tile(d).columns
    group = min(4, triton.next_power_of_2(S), max(1, _KEYS_HELD // columns))
    return group, tile(d, keys=group)


def _element(x: Tensor) -> tl.dtype:
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[x.dtype]


@triton.jit
def _inverse_rms(x, eps, D):
    return tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)


@triton.jit(do_not_specialize=["n", "rows"])
def _forward(
    table,
    keys,
    o_out,
    m_out,
    l_out,
    n,
    rows,
    eps,
    ELEMENT: tl.constexpr,
    S: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    groups: tl.constexpr = (S + GROUP - 1) // GROUP
    # The groups of a row run side by side: all but one find its sources in the cache.
    row = (tl.program_id(0) // groups).to(tl.int64) + tl.arange(0, 1)
    read = tl.program_id(0) % groups * GROUP + tl.arange(0, GROUP)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (read < S)[:, None] & (column < D)
    k = tl.load(keys + read[:, None] * D + column, mask=inside, other=0.0)
    m = tl.full([GROUP], float("-inf"), tl.float32)
    l = tl.zeros([GROUP], tl.float32)
    o = tl.zeros([GROUP, COLUMNS], tl.float32)
    x = tl.load(source(table, 0, n, row, ELEMENT, ALIGNED) + column, mask=column < D, other=0.0)
    for i in range(n):
        following = source(table, tl.minimum(i + 1, n - 1), n, row, ELEMENT, ALIGNED) + column
        following = tl.load(following, mask=(column < D) & (i + 1 < n), other=0.0)
        v = x.to(tl.float32)
        s = _inverse_rms(v, eps, D) * tl.sum(v * k, axis=1)
        m, l, before, now = softmax_step(m, l, s)
        o = o * before[:, None] + now[:, None] * v
        x = following
    place = read.to(tl.int64) * rows + row
    tl.store(o_out + place[:, None] * D + column, o, mask=inside)
    tl.store(m_out + place, m, mask=read < S)
    tl.store(l_out + place, l, mask=read < S)


@triton.jit(do_not_specialize=["n", "rows"])
def _statistics(
    table,
    keys,
    grad_o,
    grad_l,
    logits,
    projected,
    inverse,
    largest_out,
    total_out,
    position_out,
    n,
    rows,
    eps,
    ELEMENT: tl.constexpr,
    S: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    groups: tl.constexpr = (S + GROUP - 1) // GROUP
    row = (tl.program_id(0) // groups).to(tl.int64) + tl.arange(0, 1)
    read = tl.program_id(0) % groups * GROUP + tl.arange(0, GROUP)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (read < S)[:, None] & (column < D)
    k = tl.load(keys + read[:, None] * D + column, mask=inside, other=0.0)
    place = read.to(tl.int64) * rows + row
    g = tl.load(grad_o + place[:, None] * D + column, mask=inside, other=0.0)
    along_l = tl.load(grad_l + place, mask=read < S, other=0.0)
    m = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    position = tl.zeros([GROUP], tl.int32)
    for i in range(n):
        x = tl.load(source(table, i, n, row, ELEMENT, ALIGNED) + column, mask=column < D, other=0.0)
        v = x.to(tl.float32)
        r = _inverse_rms(v, eps, D)
        s, p = r * tl.sum(v * k, axis=1), tl.sum(v * g, axis=1) + along_l
        position = tl.where(s > m, i, position)
        largest = tl.maximum(m, s, propagate_nan=tl.PropagateNan.ALL)
        total = total * tl.exp(m - largest) + tl.exp(s - largest) * p
        m = largest
        tl.store(logits + (i * rows + row) * S + read, s, mask=read < S)
        tl.store(projected + (i * rows + row) * S + read, p, mask=read < S)
        tl.store(inverse + i * rows + row, r)
    tl.store(largest_out + row * S + read, m, mask=read < S)
    tl.store(total_out + row * S + read, total, mask=read < S)
    tl.store(position_out + row * S + read, position, mask=read < S)


@triton.jit(do_not_specialize=["n", "rows"])
def _gradients(
    table,
    keys,
    grad_o,
    grad_m,
    grad_l,
    logits,
    projected,
    inverse,
    largest_in,
    total_in,
    position_in,
    grad_keys,
    n,
    rows,
    ELEMENT: tl.constexpr,
    S: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    read = tl.arange(0, PADDED)
    # Features do not meet here: a chunk of them at a time leaves room for the gradients of all keys.
    column = (tl.program_id(0) % CHUNKS * CHUNK + tl.arange(0, CHUNK))[None, :]
    inside = (read < S)[:, None] & (column < D)
    k = tl.load(keys + read[:, None] * D + column, mask=inside, other=0.0)
    grad_k = tl.zeros([PADDED, CHUNK], tl.float32)
    for first in range(tl.program_id(0) // CHUNKS, rows, tl.num_programs(0) // CHUNKS):
        row = tl.cast(first, tl.int64) + tl.arange(0, 1)
        place = read.to(tl.int64) * rows + row
        g = tl.load(grad_o + place[:, None] * D + column, mask=inside, other=0.0)
        m = tl.load(largest_in + row * S + read, mask=read < S, other=0.0)
        total = tl.load(total_in + row * S + read, mask=read < S, other=0.0)
        position = tl.load(position_in + row * S + read, mask=read < S, other=0)
        along_m = tl.load(grad_m + place, mask=read < S, other=0.0)
        for i in range(n):
            x = tl.load(source(table, i, n, row, ELEMENT, ALIGNED) + column, mask=column < D, other=0.0)
            v = x.to(tl.float32)
            s = tl.load(logits + (i * rows + row) * S + read, mask=read < S, other=0.0)
            p = tl.load(projected + (i * rows + row) * S + read, mask=read < S, other=0.0)
            r = tl.load(inverse + i * rows + row)
            weight = tl.exp(s - m)
            # o and l fall when m rises; m follows its largest logit, the first of equals.
            grad_logit = weight * p + tl.where(position == i, along_m - total, 0.0)
            grad_logit = tl.where(read < S, grad_logit, 0.0)
            grad_dot = grad_logit * r
            grad_v = tl.sum(weight[:, None] * g + grad_dot[:, None] * k, axis=0, keep_dims=True)
            grad_v -= (tl.sum(grad_logit * s, axis=0) * r * r / D)[:, None] * v
            tl.store(result(table, i, n, row, D, ELEMENT, ALIGNED) + column, grad_v.to(ELEMENT), mask=column < D)
            grad_k += grad_dot[:, None] * v
    place = (tl.program_id(0) // CHUNKS * S + read)[:, None] * D + column
    tl.store(grad_keys + place, grad_k, mask=inside)
