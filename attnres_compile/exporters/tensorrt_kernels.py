"""The forward kernels in the form that TensorRT launches: an argument a tensor, and a count of rows.

The same arithmetic as ``ops/triton``, whose kernels take their sources through a table of addresses that a plugin could
not fill. The order of arguments is TensorRT's: inputs, then integers, then outputs. Rows are contiguous.
Importing this module needs ``triton``.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from attnres_compile.ops.triton.phase_two import coefficients
from attnres_compile.ops.triton.rows import normalise, rms_and_dot, softmax_step


@triton.jit
def depth_attention(
    query, key_norm, sources, rows, out,
    EPS: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``DepthAttentionN<n>``: a program for each tile of rows. ``sources`` is a tuple of pointers."""
    n: tl.constexpr = len(sources)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    place, inside = row[:, None] * D + column, (row < rows)[:, None] & (column < D)
    k = _key(query + column, key_norm + column, column < D)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, COLUMNS], tl.float32)
    x = tl.load(sources[0] + place, mask=inside, other=0.0)
    for i in range(n):
        # Asked for before the reductions, which would otherwise wait for memory at every source.
        following = tl.load(_chosen(sources, i + 1) + place, mask=inside & (i + 1 < n), other=0.0)
        v = x.to(tl.float32)
        r, z = rms_and_dot(v, k, EPS, D)
        s = r * z
        m, l, before, now = softmax_step(m, l, s)
        o = o * before[:, None] + now[:, None] * v
        x = following
    o *= (SCALE / l)[:, None]
    tl.store(out + place, o.to(out.dtype.element_ty), mask=inside)


@triton.jit
def inter_block(
    queries, key_norms, blocks, rows, o_out, z_out,
    EPS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``InterBlockN<n>S<s>``: a program for each row and group of reads.

    ``blocks``, ``o_out`` and ``z_out`` are tuples of pointers, to n blocks and to a result of each of s reads.
    """
    n: tl.constexpr = len(blocks)
    S: tl.constexpr = len(o_out)
    groups: tl.constexpr = (S + GROUP - 1) // GROUP
    row = (tl.program_id(0) // groups).to(tl.int64) + tl.arange(0, 1)
    read = tl.program_id(0) % groups * GROUP + tl.arange(0, GROUP)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (read < S)[:, None] & (column < D)
    of_read = read[:, None] * D + column
    k = _key(queries + of_read, key_norms + of_read, inside)
    m = tl.full([GROUP], float("-inf"), tl.float32)
    l = tl.zeros([GROUP], tl.float32)
    o = tl.zeros([GROUP, COLUMNS], tl.float32)
    x = tl.load(blocks[0] + row[:, None] * D + column, mask=column < D, other=0.0)
    for i in range(n):
        following = _chosen(blocks, i + 1) + row[:, None] * D + column
        following = tl.load(following, mask=(column < D) & (i + 1 < n), other=0.0)
        v = x.to(tl.float32)
        s = tl.rsqrt(tl.sum(v * v, axis=1) / D + EPS) * tl.sum(v * k, axis=1)
        m, l, before, now = softmax_step(m, l, s)
        o = o * before[:, None] + now[:, None] * v
        x = following
    tl.store(_chosen(o_out, read)[:, None] + row[:, None] * D + column, o / l[:, None], mask=inside)
    tl.store(_chosen(z_out, read) + row, m + tl.log(l), mask=read < S)


@triton.jit
def merge(
    o_in, z_in, partial, query, key_norm, rows, out,
    EPS: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``Merge``: a program for each tile of rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    valid = row < rows
    place, inside = row[:, None] * D + column, valid[:, None] & (column < D)
    x = tl.load(partial + place, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(o_in + place, mask=inside, other=0.0)
    k = _key(query + column, key_norm + column, column < D)
    z = tl.load(z_in + row, mask=valid, other=0.0)
    of_blocks, of_partial, _, _ = coefficients(x, k, z, 1.0, valid, EPS, D)
    h = (of_blocks * SCALE)[:, None] * o + (of_partial * SCALE)[:, None] * x
    tl.store(out + place, h.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_merge_norm(
    o_in, z_in, partial, branch, query, key_norm, weight, bias, rows, total, out,
    EPS: tl.constexpr, NORM_EPS: tl.constexpr, SCALE: tl.constexpr, CENTRED: tl.constexpr,
    D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``AddMergeRMSNorm`` and ``AddMergeLayerNorm``; without ``branch`` and ``total`` those without ``Add``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    valid = row < rows
    place, inside = row[:, None] * D + column, valid[:, None] & (column < D)
    x = tl.load(partial + place, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(o_in + place, mask=inside, other=0.0)
    k = _key(query + column, key_norm + column, column < D)
    z = tl.load(z_in + row, mask=valid, other=0.0)
    if branch is not None:
        # The rounded sum is what later reads see.
        rounded = (x + tl.load(branch + place, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        x = rounded.to(tl.float32)
    of_blocks, of_partial, _, _ = coefficients(x, k, z, 1.0, valid, EPS, D)
    h = (of_blocks * SCALE)[:, None] * o + (of_partial * SCALE)[:, None] * x
    y, _ = normalise(h, valid, inside, NORM_EPS, CENTRED, D)
    y *= tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    y += tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _key(query, key_norm, mask):
    """``query * key_norm``: only this product reaches the logits."""
    q = tl.load(query, mask=mask, other=0.0).to(tl.float32)
    return q * tl.load(key_norm, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _chosen(pointers, i):
    """Pointer ``i``, the first one past the end: an unrolled loop would hold all sources until its end."""
    found = pointers[0]
    for j in tl.static_range(1, len(pointers)):
        found = tl.where(i == j, pointers[j], found)
    return found
