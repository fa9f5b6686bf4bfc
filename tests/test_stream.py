"""The stream as a value against the reference, in fp64 with random parameters."""

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attnres_compile import stream as streams
from attnres_compile.errors import RefusedError
from attnres_compile.observer import Observer
from attnres_compile.ops import reference
from attnres_compile.stream import Stream, TensorStream, is_stream, map_streams
from tests.stream_material import (
    EPS,
    SHAPE,
    SIZES,
    WIDTH,
    Count,
    begun,
    expected_read,
    plan_of,
    pushed,
    random,
    random_reads,
    sources_of,
)
from tests.tolerances import assert_close

every_size = pytest.mark.parametrize("sizes", SIZES, ids=str)


@every_size
@pytest.mark.parametrize("preserve", [True, False], ids=["preserve", "mean"])
@pytest.mark.parametrize("key_norm", [True, False], ids=["key norm", "no key norm"])
def test_every_read_against_the_reference(sizes: list[int], preserve: bool, key_norm: bool) -> None:
    stream = begun(sizes, preserve=preserve, key_norm=key_norm)
    branches = [random(seed=position) for position in range(1, 7)]
    assert torch.equal(stream.read(), random())
    for position, branch in enumerate(branches, 1):
        stream = stream.push(branch)
        sources = sources_of(stream, branches[:position], random())
        assert stream.position == position
        assert len(stream.sources) == len(sources) == stream.plan.sources[position - 1]
        for ours, expected in zip(stream.sources, sources, strict=True):
            assert_close(ours, expected)
        assert_close(stream.read(), expected_read(stream, sources, position - 1), f"position {position}")
        assert_close(stream.total(), random() + sum(branches[:position]))


@every_size
def test_a_chain_of_sublayers_against_the_reference(sizes: list[int]) -> None:
    weights = [random(WIDTH, WIDTH, seed=20 + i) / 3 for i in range(6)]
    stream = begun(sizes)
    for weight in weights:
        stream = stream.push(torch.tanh(stream.read() @ weight))
    expected = reference.block_attnres(
        random(),
        [lambda x, w=weight: torch.tanh(x @ w) for weight in weights],  # type: ignore[misc]
        stream.reads.query,
        stream.reads.key_norm,
        sizes,
        eps=EPS,
        preserve=True,
    )
    assert_close(stream.read(), expected)


@every_size
def test_gradients_against_the_reference(sizes: list[int]) -> None:
    def gradients(by_stream: bool) -> list[Tensor]:
        source, weight = random().requires_grad_(), (random(WIDTH, WIDTH, seed=30) / 3).requires_grad_()
        stream = begun(sizes, source)
        parameters = list(stream.reads.parameters())
        if by_stream:
            for _ in range(6):
                stream = stream.push(torch.tanh(stream.read() @ weight))
            final = stream.read()
        else:
            query, key_norm = parameters
            sublayers = [lambda x: torch.tanh(x @ weight)] * 6
            final = reference.block_attnres(source, sublayers, query, key_norm, sizes, eps=EPS, preserve=True)
        loss = (final * random(seed=40)).sum()
        return list(torch.autograd.grad(loss, [source, weight, *parameters]))

    for ours, expected in zip(gradients(True), gradients(False), strict=True):
        assert_close(ours, expected)


@every_size
def test_zero_queries_read_the_sum(sizes: list[int]) -> None:
    stream = begun(sizes)
    with torch.no_grad():
        stream.reads.query.zero_()
    for _ in range(6):
        stream = pushed(stream, 1)
        assert_close(stream.read(), stream.total())


def test_unread_states() -> None:
    """Two pushes between the reads: a sublayer. The state between has no row, and its read is the sum."""
    stream = begun((1, 2), unread=(1, 3))
    branches = [random(seed=position) for position in range(1, 6)]
    assert stream.plan.rows == (-1, -1, 0, -1, 1, 2)
    for branch in branches[:2]:
        stream = stream.push(branch)
    assert_close(stream.read(), expected_read(stream, [random(), branches[0] + branches[1]], 0))
    middle = stream.push(branches[2])
    assert torch.equal(middle.read(), middle.total())
    after = middle.push(branches[3])
    first = branches[0] + branches[1]
    assert_close(after.read(), expected_read(after, [random(), first, branches[2] + branches[3]], 1))
    # a push that the plan does not know
    beyond = pushed(after, 3)
    assert beyond.position > beyond.plan.last
    assert_close(beyond.read(), beyond.total())


@every_size
def test_states_are_values(sizes: list[int]) -> None:
    """Two continuations of one state do not see each other, and the state stays."""
    stream = pushed(begun(sizes), 3)
    before, sources = stream.read().clone(), [source.clone() for source in stream.sources]
    first, second = stream.push(random(seed=50)), stream.push(random(seed=51))
    again = stream.push(random(seed=50))
    assert torch.equal(first.read(), again.read())
    assert not torch.allclose(first.read(), second.read())
    assert torch.equal(stream.read(), before)
    assert all(torch.equal(a, b) for a, b in zip(stream.sources, sources, strict=True))


@every_size
def test_finished_blocks_are_read_once(sizes: list[int]) -> None:
    """Phase 1 runs where a block of several reads starts; its reads are merges, the other ones go over all sources."""
    with Count() as count:
        stream = begun(sizes)
        for _ in range(6):
            stream = pushed(stream, 1)
            stream.read()
    later = [size + (i == len(sizes) - 1) for i, size in enumerate(sizes)][1:]
    shared = [size for size in later if size > 1]
    assert count.seen["inter_block"] == len(shared)
    assert count.seen["merge"] == sum(shared)
    assert count.seen["depth_attention"] == 6 - sum(shared)
    assert count.seen["stack"] == count.seen["cat"] == 0


@pytest.mark.parametrize("position", [4, 5, 6])
def test_moved_within_a_block(position: int) -> None:
    """A skipped layer: the state is where the plan has it, and has the sources that it has."""
    stream = pushed(begun((2, 4)), 3)
    moved = stream.at(position)
    assert (moved.position, len(moved.sources)) == (position, 3)
    assert_close(moved.read(), expected_read(moved, stream.sources, position - 1))
    assert stream.at(3) is stream


def test_moved_across_the_end_of_a_block() -> None:
    stream = pushed(begun((2, 2, 2)), 1)
    moved = stream.at(2)
    assert moved.partial is None
    assert_close(moved.read(), expected_read(moved, stream.sources, 1))
    far = stream.at(5)
    assert len(far.blocks) == 2
    assert_close(far.read(), expected_read(far, stream.sources, 4))
    # the next push opens a block of its own
    after = far.push(random(seed=60))
    assert_close(after.read(), expected_read(after, [*stream.sources, random(seed=60)], 5))


def test_moved_back() -> None:
    """More visits of a layer than the plan knows stay at its last position."""
    stream = pushed(begun((2, 4)), 5)
    assert_close(stream.at(3).read(), expected_read(stream, stream.sources, 2))


@pytest.mark.parametrize("seen", [2, 3, 5])
def test_mapped_sources(seen: int) -> None:
    stream = pushed(begun(), seen)
    doubled = stream.map(lambda v: 2 * v, -1)
    sources = [2 * source for source in stream.sources]
    assert_close(doubled.read(), expected_read(stream, sources, seen - 1))
    swapped = stream.map(lambda v: v.transpose(1, 2), -2)
    assert tuple(swapped.shape) == (2, WIDTH, 4)
    assert_close(swapped.read(), stream.read().transpose(1, 2))
    assert_close(pushed(swapped.map(lambda v: v.transpose(1, 2), -1), 1).read(), pushed(stream, 1).read())


@pytest.mark.parametrize("axis", [-2, -3])
@every_size
def test_feature_axis(sizes: list[int], axis: int) -> None:
    """The features of a channel-first stream are not its last axis."""
    value = random().movedim(-1, axis)
    stream, plain = begun(sizes, value, axis), begun(sizes)
    for position in range(1, 7):
        stream = stream.push(random(seed=position).movedim(-1, axis))
        plain = plain.push(random(seed=position))
        assert_close(stream.read().movedim(axis, -1), plain.read())


def test_numbers_and_broadcast_branches() -> None:
    stream = begun((1, 2))
    row, number = random(WIDTH, seed=70), 0.5
    stream = stream.push(row)
    assert [tuple(source.shape) for source in stream.sources] == [SHAPE, SHAPE]
    stream = stream.push(number)
    sources = [random(), row.expand(SHAPE), torch.full(SHAPE, number, dtype=torch.float64)]
    assert_close(stream.read(), expected_read(stream, sources, 1))
    stream = stream.push(row)
    sources[-1] = sources[-1] + row
    assert_close(stream.read(), expected_read(stream, sources, 2))


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("second", [torch.float32, torch.float64])
def test_a_wider_branch_promotes(first: torch.dtype, second: torch.dtype) -> None:
    stream = begun((2, 2), random(dtype=first))
    after = pushed(stream, 3).push(random(seed=9, dtype=second))
    plain = random(dtype=first) + random(dtype=second)
    assert after.dtype == plain.dtype
    assert {source.dtype for source in after.sources} == {plain.dtype}
    assert after.read().dtype == plain.dtype
    narrow = begun((2, 2), random(dtype=second)).push(random(seed=9, dtype=first))
    assert narrow.dtype == second
    assert narrow.read().dtype == second


def test_read_keeps_the_dtype() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        stream = begun((2, 2), random(dtype=dtype))
        for _ in range(4):
            stream = pushed(stream, 1)
            assert stream.read().dtype == dtype


def test_stale_states_are_refused() -> None:
    stream = pushed(begun(), 2)
    stream.changes.append("by a test")
    for use in (stream.read, stream.total, stream.current, lambda: stream.sources):
        with pytest.raises(RefusedError, match=r"changed in place \(by a test\)"):
            use()
    assert tuple(stream.shape) == SHAPE


def test_states_that_share_memory_are_stale_together() -> None:
    stream = pushed(begun(), 2)
    view, moved, after = stream.map(lambda v: v, -1).sharing(stream), stream.at(3), stream.push(random())
    stream.changes.append("by a test")
    for state in (stream, view, moved):
        with pytest.raises(RefusedError, match="by a test"):
            state.current()
    assert after.current() is after
    assert after.sharing(stream).current() is after


def test_stale_states_are_refused_when_moved() -> None:
    stream = pushed(begun(), 2)
    stream.changes.append("by a test")
    with pytest.raises(RefusedError, match="changed in place"):
        stream.at(3)


@every_size
def test_pytree_round_trip(sizes: list[int]) -> None:
    for count in range(6):
        stream = pushed(begun(sizes), count)
        leaves, spec = pytree.tree_flatten({"x": stream, "mask": None})
        back = pytree.tree_unflatten(leaves, spec)["x"]
        assert type(back) is type(stream)
        assert (back.position, back.axis, back.plan) == (stream.position, stream.axis, stream.plan)
        assert torch.equal(back.read(), stream.read())
        assert torch.equal(pushed(back, 1).read(), pushed(stream, 1).read())
        scaled = pytree.tree_map_only(Tensor, lambda leaf: leaf.clone(), [stream])[0]
        assert torch.equal(scaled.read(), stream.read())


def test_kinds() -> None:
    stream = begun()
    assert isinstance(stream, TensorStream)
    assert isinstance(stream, Stream)
    assert isinstance(stream, Tensor)
    assert is_stream(stream)
    assert not is_stream(random())
    assert isinstance(stream.push(random()), TensorStream)
    plain = Stream((random(),), None, None, 0, -1, stream.plan, stream.reads)
    assert is_stream(plain)
    assert type(plain.push(random())) is Stream


def test_description() -> None:
    stream = pushed(begun((2, 2)), 3)
    assert repr(stream) == f"TensorStream(position=3, blocks=2, shape={SHAPE})"
    assert len(stream) == 2
    assert (stream.ndim, stream.dtype, stream.device) == (3, torch.float64, torch.device("cpu"))


def test_requires_grad_of_a_source() -> None:
    stream, branch = begun((2, 2)), random().requires_grad_()
    plain = Stream((random(),), None, None, 0, -1, stream.plan, stream.reads)
    assert not plain.requires_grad
    assert plain.push(branch).requires_grad
    # FSDP would pass it through autograd.
    assert not stream.push(branch).requires_grad


def test_observer() -> None:
    reads = random_reads(plan_of([2, 2], chain=3))
    stream = streams.start(random(), -1, plan_of([2, 2], chain=3), reads)
    with Observer() as observer:
        stream = pushed(stream, 3)
        stream.read()
        stream.read()
    pushed(stream, 1).read()
    assert observer.pushes == {3: 3}
    assert observer.rows == {(3, 2)}
    assert observer.dtypes == {torch.float64}
    assert Observer.active is None


class Result(NamedTuple):
    hidden: Any
    mask: Any


def test_streams_in_containers() -> None:
    stream = begun()
    value = [stream, (1, {"x": stream}), Result(stream, None), OrderedDict(a=stream, b=2)]
    replaced = map_streams(value, lambda s: "read")
    assert replaced == ["read", (1, {"x": "read"}), Result("read", None), OrderedDict(a="read", b=2)]
    assert [type(item) for item in replaced[1:]] == [type(item) for item in value[1:]]
    assert value[0] is stream
    without = {"a": [1, (2, None)], "b": random()}
    assert map_streams(without, lambda s: "read") is without
