"""Rows, block ends and phase-1 rows against a count of the sources that each read has."""

from collections.abc import Collection, Iterator
from typing import Any

import pytest
from torch import fx

from attnres_compile.chains import BlockPlan, Push, ResidualChain
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import OptionError
from attnres_compile.passes.plan_blocks import PlanBlocks, plan
from tests.passes.models import Net
from tests.passes.tracing import exported, subject


def chain(length: int, unread: Collection[int] = ()) -> ResidualChain:
    """A chain of `length` pushes of which the states at `unread` have no reader."""
    graph = fx.Graph()
    source = graph.placeholder("source")
    made = ResidualChain(source, -1, 8, None)
    previous = None
    for position in range(1, length + 1):
        previous = Push(graph.placeholder(f"push_{position}"), position, "", "", previous)
        made.pushes.append(previous)
    reader = graph.placeholder("reader")
    made.readers = {position: [reader] for position in range(length + 1) if position not in unread}
    return made


def sizes_by_hand(sublayers: int, num_blocks: int | None, block_size: int | None) -> list[int]:
    """Deal the sublayers out one by one: round and round the blocks, or until a block is full."""
    if block_size is not None:
        blocks = [0]
        for _ in range(sublayers):
            if blocks[-1] == block_size:
                blocks.append(0)
            blocks[-1] += 1
        return blocks
    blocks = [0] * (num_blocks or min(8, sublayers))
    for i in range(sublayers):
        blocks[i % len(blocks)] += 1
    return blocks


def reads_by_hand(length: int, unread: Collection[int], sizes: list[int]) -> Iterator[tuple[int, int, int, bool]]:
    """Per read state its position, the finished blocks, all of its sources, and whether a block ends there.

    Walks the pushes as Block AttnRes is written down: a list of finished blocks and a partial sum.
    """
    left, finished, partial = [*sizes], 1, False
    for position in range(1, length + 1):
        partial = True
        if position in unread:
            continue
        left[0] -= 1
        ends = left[0] == 0 and len(left) > 1
        if ends:
            left.pop(0)
            finished, partial = finished + 1, False
        yield position, finished, finished + partial, ends


CASES: list[tuple[int, tuple[int, ...]]] = [(n, ()) for n in (1, 2, 3, 4, 5, 7, 8, 9, 12, 24)]
# parallel attention and MLP; a state that only the last push follows; unread states at the end
CASES += [(8, (1, 3, 5, 7)), (6, (5,)), (7, (2, 3, 6)), (5, (1, 2, 3))]


@pytest.mark.parametrize(("length", "unread"), CASES, ids=str)
@pytest.mark.parametrize("preserve", [True, False])
def test_against_brute_force(length: int, unread: tuple[int, ...], preserve: bool) -> None:
    sublayers = length - len(unread)
    options: list[dict[str, Any]] = [{}, *({"num_blocks": n} for n in range(1, sublayers + 1))]
    options += [{"block_size": n} for n in (1, 2, 3, 4, 5, sublayers, sublayers + 3)]
    for option in options:
        made = plan(chain(length, unread), AttnResConfig(**option, preserve=preserve, eps=1e-5), 3)
        sizes = sizes_by_hand(sublayers, option.get("num_blocks"), option.get("block_size"))
        assert made.block_sizes == tuple(sizes), option
        reads = list(reads_by_hand(length, unread, sizes))
        assert (made.chain, made.preserve, made.eps) == (3, preserve, 1e-5)
        assert (made.last, made.reads) == (length, sublayers)
        check(made, reads, unread)


def check(made: BlockPlan, reads: list[tuple[int, int, int, bool]], unread: Collection[int]) -> None:
    rows = {position: row for row, (position, *_) in enumerate(reads)}
    assert made.rows == (-1, *(rows.get(position, -1) for position in range(1, made.last + 1)))
    assert made.closes == tuple(
        any(p == position and ends for p, *_, ends in reads) for position in range(made.last + 1)
    )
    assert made.sources == tuple(sources for _, _, sources, _ in reads)
    # The rows that phase 1 computes when a block has closed are those of the reads over the same finished blocks.
    by_finished: dict[int, list[int]] = {}
    for row, (_, finished, _, _) in enumerate(reads):
        by_finished.setdefault(finished, []).append(row)
    finished = 1
    for position in range(made.last + 1):
        finished += made.closes[position]
        first, stop = made.phase_rows[position]
        assert list(range(first, stop)) == by_finished.get(finished, [])
    assert not {made.rows[position] for position in unread} - {-1}


def test_listing_of_the_docstring() -> None:
    made = plan(chain(8), AttnResConfig(num_blocks=2), 0)
    assert made.rows == (-1, 0, 1, 2, 3, 4, 5, 6, 7)
    assert [position for position, closes in enumerate(made.closes) if closes] == [4]
    assert made.phase_rows == ((0, 3),) * 4 + ((3, 8),) * 5


def test_more_blocks_than_sublayers() -> None:
    with pytest.raises(OptionError, match="num_blocks=4 is larger than the 3 sublayers"):
        plan(chain(3), AttnResConfig(num_blocks=4), 0)
    # the default fits any chain
    assert plan(chain(3), AttnResConfig(), 0).block_sizes == (1, 1, 1)


def test_pass_is_idempotent() -> None:
    found = subject(exported(Net()).module, [chain(4), chain(6)], num_blocks=2)
    text = str(found.module.graph)
    assert PlanBlocks()(found)
    plans = [chain.plan for chain in found.chains]
    assert [made.chain for made in plans if made] == [0, 1]
    assert not PlanBlocks()(found)
    assert [chain.plan for chain in found.chains] == plans
    assert str(found.module.graph) == text
    assert not PlanBlocks()(subject(found.module))


@pytest.mark.parametrize("chains", [[1], lambda index: index == 1], ids=["indices", "predicate"])
def test_selected_chains_alone(chains: Any) -> None:
    found = subject(exported(Net()).module, [chain(4), chain(6), chain(8)], chains=chains)
    assert PlanBlocks()(found)
    # its parameters are the only ones: they are number 0
    assert [None if made.plan is None else made.plan.chain for made in found.chains] == [None, 0, None]
    assert found.chains[1].plan is not None
    assert found.chains[1].plan.reads == 6


def test_other_options_make_another_plan() -> None:
    found = subject(exported(Net()).module, [chain(4)], num_blocks=2)
    PlanBlocks()(found)
    again = subject(found.module, found.chains, block_size=1)
    assert PlanBlocks()(again)
    assert again.chains[0].plan is not None
    assert again.chains[0].plan.block_sizes == (1, 1, 1, 1)
