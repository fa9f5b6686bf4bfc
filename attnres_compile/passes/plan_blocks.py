"""Cut each chain into blocks: which row of the parameters a state reads with, and where a block ends.

Before::

    chain: pushes at positions 1..8, states 1..8 read          (num_blocks=2)

After::

    rows        -1  0  1  2  3  4  5  6  7     position 0 is the source: one source, no parameters
    closes       .  .  .  .  x  .  .  .  .     the last block stays open for the final read

Counts sublayers: what is pushed between two states that are read. An unread state has no row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from attnres_compile.chains import BlockPlan, ResidualChain
from attnres_compile.config import AttnResConfig
from attnres_compile.passes.base import Subject


@dataclass(frozen=True)
class PlanBlocks:
    """Pass: see the module's text."""

    def __call__(self, subject: Subject) -> bool:
        """Give every selected chain its plan, numbered in order."""
        chosen = [chain for i, chain in enumerate(subject.chains) if subject.config.selects(i)]
        plans = [plan(chain, subject.config, i) for i, chain in enumerate(chosen)]
        modified = any(chain.plan != new for chain, new in zip(chosen, plans, strict=True))
        for chain, new in zip(chosen, plans, strict=True):
            chain.plan = new
        return modified


def plan(chain: ResidualChain, config: AttnResConfig, index: int) -> BlockPlan:
    """The plan of one chain, whose parameters have this index.

    Raises:
        OptionError: more blocks were asked for than the chain has sublayers.
    """
    sizes = config.block_sizes(chain.sublayers)
    ends = set(accumulate(sizes[:-1]))
    rows, closes, count = [-1], [False], 0
    for position in range(1, chain.length + 1):
        read = position in chain.readers
        count += read
        rows.append(count - 1 if read else -1)
        closes.append(read and count in ends)
    first_rows = [0, *(end - 1 for end in sorted(ends)), chain.sublayers]
    # The last block's reads include the final one, made while its partial sum is still open.
    groups = list(pairwise(first_rows))
    blocks_before = list(accumulate(closes))
    opened = [0, *sorted(ends)]
    # The read of the state after ``count`` sublayers: b_0, the finished blocks, and the open block's partial sum.
    sources = tuple(
        1 + sum(end <= count for end in ends) + (count not in opened) for count in range(1, chain.sublayers + 1)
    )
    return BlockPlan(
        chain=index,
        rows=tuple(rows),
        closes=tuple(closes),
        phase_rows=tuple(groups[finished] for finished in blocks_before),
        block_sizes=sizes,
        sources=sources,
        preserve=config.preserve,
        eps=config.eps,
    )
