"""How tensors become kernel arguments: rows, tables of addresses, and the size of a launch."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_READS = 128
# Triton's own switch: its interpreter takes tensors of any device.
INTERPRETED = triton.knobs.runtime.interpret

_VECTOR_BYTES = 16
_PER_THREAD = 16
_MOST_WARPS = 16
_ENTRIES = 32


class Tile(NamedTuple):
    """The piece of a ``[rows, d]`` tensor that a program holds: all features of ``rows`` rows."""

    rows: int
    columns: int
    warps: int

    def count(self, rows: int) -> int:
        """Number of tiles that cover ``rows`` rows."""
        return -(-rows // self.rows)


def tile(d: int, keys: int = 1) -> Tile:
    """A tile whose threads hold about 16 features each, for each of ``keys`` rows of state.

    More warps a row would spend their time in reductions, fewer would spill.
    """
    columns = max(16, triton.next_power_of_2(d))
    rows = max(1, 512 // columns) if keys == 1 else 1
    warps = rows * columns * keys // (32 * _PER_THREAD * (2 if keys > 1 else 1))
    return Tile(rows, columns, min(max(warps, 1), _MOST_WARPS))


def programs(device: torch.device, tiles: int, warps: int) -> int:
    """Programs of a kernel that sums over rows: as many as are resident at once, each with one partial sum."""
    if device.type != "cuda":
        return min(tiles, 3)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(tiles, processors * max(1, _MOST_WARPS // warps))


def rows_of(x: Tensor) -> Tensor:
    """``x`` as ``[rows, d]`` with unit feature stride; copied only where its strides do not allow that."""
    d = x.shape[-1]
    rows = x.reshape(x.numel() // d, d)
    return rows if d == 1 or rows.stride(1) == 1 else rows.contiguous()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` current: Triton launches on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Table(NamedTuple):
    """A list of ``[rows, d]`` tensors as one int64 tensor: addresses, row strides, and addresses of results."""

    entries: Tensor
    aligned: bool


def table(sources: Sequence[Tensor], results: Sequence[Tensor] = ()) -> Table:
    """The table of ``sources`` and contiguous ``results``.

    A kernel writes it: a copy from the host could not be captured in a CUDA graph.
    """
    addresses = [x.data_ptr() for x in (*sources, *results)]
    strides = [x.stride(0) for x in sources]
    size = sources[0].element_size()
    values = [*addresses[: len(sources)], *strides, *addresses[len(sources) :]]
    aligned = all(a % _VECTOR_BYTES == 0 for a in addresses) and all(s * size % _VECTOR_BYTES == 0 for s in strides)
    # A result has the stride d, which the kernel knows.
    entries = torch.empty(-(-len(values) // _ENTRIES) * _ENTRIES, dtype=torch.int64, device=sources[0].device)
    values += [0] * (len(entries) - len(values))
    for start in range(0, len(values), _ENTRIES):
        _write[(1,)](entries, start, *values[start : start + _ENTRIES], num_warps=1)
    return Table(entries, aligned)


# Parameters, not a tuple: the elements of a tuple are specialised on their values, a compilation for each.
_VALUES = [f"v{i}" for i in range(_ENTRIES)]


# fmt: off
@triton.jit(do_not_specialize=["start", *_VALUES])
def _write(
    entries, start: tl.int32,
    v0: tl.int64, v1: tl.int64, v2: tl.int64, v3: tl.int64, v4: tl.int64, v5: tl.int64,
    v6: tl.int64, v7: tl.int64, v8: tl.int64, v9: tl.int64, v10: tl.int64, v11: tl.int64,
    v12: tl.int64, v13: tl.int64, v14: tl.int64, v15: tl.int64, v16: tl.int64, v17: tl.int64,
    v18: tl.int64, v19: tl.int64, v20: tl.int64, v21: tl.int64, v22: tl.int64, v23: tl.int64,
    v24: tl.int64, v25: tl.int64, v26: tl.int64, v27: tl.int64, v28: tl.int64, v29: tl.int64,
    v30: tl.int64, v31: tl.int64,
):
    values = (
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
        v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29, v30, v31,
    )
    for i in tl.static_range(32):
        tl.store(entries + start + i, values[i])
# fmt: on


@triton.jit
def source(table, i, n, row, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers ``[rows, 1]`` to rows of the table's source ``i`` of ``n``."""
    first = tl.load(table + i).to(tl.pointer_type(ELEMENT))
    stride = tl.load(table + n + i)
    if ALIGNED:
        # Without these the compiler can only load one element at a time.
        first = tl.multiple_of(first, 16)
        stride = tl.multiple_of(stride, 128 // ELEMENT.primitive_bitwidth)
    return first + row[:, None] * stride


@triton.jit
def result(table, i, n, row, D, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers ``[rows, 1]`` to rows of the table's result ``i``."""
    first = tl.load(table + 2 * n + i).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return first + row[:, None] * D
