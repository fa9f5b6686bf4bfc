"""Plans, parameters and branches for the tests of streams, and a count of the operators that run."""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnres_compile.chains import BlockPlan
from attnres_compile.ops import reference
from attnres_compile.reads import DepthReads
from attnres_compile.stream import Stream, start

WIDTH = 6
EPS = 1e-3
SHAPE = (2, 4, WIDTH)
# S = 1, 2, 3, 4, uneven, all
SIZES = ([1] * 6, [2, 2, 2], [3, 3], [4, 2], [3, 2, 1], [6])


def plan_of(sizes: Sequence[int], *, preserve: bool = True, unread: Collection[int] = (), chain: int = 0) -> BlockPlan:
    """The plan of a chain with blocks of these sizes, whose states at `unread` nobody reads."""
    ends = list(accumulate(sizes))
    rows, closes, phase_rows, sources = [-1], [False], [(0, max(ends[0] - 1, 0) if len(ends) > 1 else ends[0])], []
    count = block = 0
    while count < ends[-1]:
        read = len(rows) not in unread
        count += read
        rows.append(count - 1 if read else -1)
        closes.append(read and count in ends[:-1])
        block += closes[-1]
        if read:
            sources.append(1 + block + (not closes[-1]))
        first = ends[block - 1] - 1 if block else 0
        stop = ends[block] - 1 if block < len(ends) - 1 else ends[-1]
        phase_rows.append((first, stop))
    return BlockPlan(chain, tuple(rows), tuple(closes), tuple(phase_rows), tuple(sizes), tuple(sources), preserve, EPS)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_reads(plan: BlockPlan, width: int = WIDTH, *, key_norm: bool = True) -> DepthReads:
    reads = DepthReads(plan.reads, width, key_norm=key_norm, dtype=torch.float64)
    with torch.no_grad():
        reads.query.copy_(random(plan.reads, width, seed=11))
        if reads.key_norm is not None:
            reads.key_norm.copy_(1 + random(plan.reads, width, seed=12) / 4)
    return reads


def begun(sizes: Sequence[int] = (2, 2, 2), value: Tensor | None = None, axis: int = -1, **options: Any) -> Any:
    """A stream at its source, with random parameters; of any type, for it takes the operations of a tensor."""
    key_norm = options.pop("key_norm", True)
    plan = plan_of(sizes, **options)
    value = random() if value is None else value
    reads = random_reads(plan, value.shape[axis], key_norm=key_norm)
    return start(value, axis, plan, reads.to(value.dtype))


def pushed(stream: Any, count: int) -> Any:
    """The stream after that many pushes of random branches of its shape."""
    for position in range(stream.position + 1, stream.position + count + 1):
        stream = stream.push(random(*stream.shape, seed=position, dtype=stream.dtype))
    return stream


def sources_of(stream: Stream, branches: Sequence[Tensor], source: Tensor) -> list[Tensor]:
    """The sources after these branches, written down from the block sizes alone."""
    finished, partial, left = [source], list[Tensor](), list(stream.plan.block_sizes)
    for branch in branches:
        partial = [partial[0] + branch] if partial else [branch]
        left[0] -= 1
        if left[0] == 0 and len(left) > 1:
            left.pop(0)
            finished, partial = finished + partial, []
    return finished + partial


def expected_read(stream: Stream, sources: Sequence[Tensor], row: int) -> Tensor:
    """The reference's read of sources whose features are last."""
    key_norm = None if stream.reads.key_norm is None else stream.reads.key_norm[row]
    scale = float(len(sources)) if stream.plan.preserve else 1.0
    return reference.depth_attention(sources, stream.reads.query[row], key_norm, eps=EPS, scale=scale)


class Count(TorchDispatchMode):
    """Counts the operators that run, our own by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._schema.name.rpartition("::")[2]] += 1
        return func(*args, **(kwargs or {}))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)

    @property
    def reads(self) -> int:
        return self.seen["depth_attention"] + self.seen["merge"]
