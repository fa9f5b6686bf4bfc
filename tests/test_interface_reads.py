"""Everything that is neither an addition nor carried reads, and what changes a stream in place is refused."""

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attnres_compile.errors import RefusedError
from attnres_compile.stream import Stream, is_stream
from tests.stream_material import SHAPE, WIDTH, Count, begun, pushed, random
from tests.tolerances import assert_close

F64 = torch.float64
Operation = Callable[[Any], Any]
MATRIX, MASK = random(WIDTH, WIDTH, seed=81), random(seed=86) > 0
NORM = nn.LayerNorm(WIDTH, dtype=F64)

READS: dict[str, Operation] = {
    "linear": lambda x: F.linear(x, MATRIX),
    "module": NORM,
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,)),
    "matmul": lambda x: x @ MATRIX,
    "matmul, second": lambda x: MATRIX @ x.transpose(1, 2),
    "einsum": lambda x: torch.einsum("btd,de->bte", x, MATRIX),
    "product with a tensor": lambda x: x * random(seed=87),
    "tanh": lambda x: x.tanh(),
    "relu": F.relu,
    "softmax": lambda x: x.softmax(-1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "sum": lambda x: x.sum((0, 1)),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "power": lambda x: x**2,
    "reciprocal": lambda x: 1 / x,
    "number minus x": lambda x: 1 - x,
    "cat": lambda x: torch.cat([x, random(seed=89)], 1),
    "stack": lambda x: torch.stack([x, x]),
    "where": lambda x: torch.where(MASK, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(MASK, 0.0),
    "mask": lambda x: x[MASK],
    "features": lambda x: x[..., :3],
    "a feature": lambda x: x[:, :, 0],
    "features by index": lambda x: x[..., torch.tensor([1, 0])],
    "narrow features": lambda x: x.narrow(-1, 0, 2),
    "chunk": lambda x: x.chunk(2, -1),
    "unbind": lambda x: x.unbind(1),
    "iteration": lambda x: list(x),
    "heads": lambda x: x.view(2, 4, 3, 2),
    "merged tokens": lambda x: x.flatten(1),
    "features unsqueezed": lambda x: x.unsqueeze(-1),
    "comparison": lambda x: x > 0,
    "equality": lambda x: x == random(),
    "isfinite": lambda x: x.isfinite().all(),
    "detach": lambda x: x.detach(),
    "item": lambda x: x.max().item(),
    "float": lambda x: float(x.abs().max()),
    "bool": lambda x: bool((x.abs() < 1e6).all()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "complex": lambda x: torch.complex(x, x),
    "real part": lambda x: x.real,
    "transposed by attribute": lambda x: x.mT,
    "pooling": lambda x: F.adaptive_avg_pool1d(x, 2),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "embedding bag of numbers": lambda x: torch.bucketize(x, torch.linspace(-1, 1, 4, dtype=F64)),
}


def same(actual: Any, expected: Any) -> bool:
    ours, theirs = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    pairs = zip(ours, theirs, strict=True)
    return all(
        a.shape == e.shape and torch.allclose(a, e, 1e-10) if isinstance(a, Tensor) else a == e for a, e in pairs
    )


@pytest.mark.parametrize("seen", [1, 3, 4])
@pytest.mark.parametrize("name", READS)
def test_reads(name: str, seen: int) -> None:
    operation = READS[name]
    with torch.no_grad():
        stream = pushed(begun(), seen)
        with Count() as count:
            result = operation(stream)
        assert not any(is_stream(leaf) for leaf in pytree.tree_leaves(result))
        assert count.reads >= 1
        assert same(result, operation(stream.read()))
        # nothing of it went into the stream
        assert torch.equal(stream.total(), pushed(begun(), seen).total())


def test_a_read_of_the_source_is_the_source() -> None:
    source = random()
    stream = begun(value=source)
    with Count() as count:
        assert stream.read() is source
        assert same(stream.tanh(), source.tanh())
    assert count.reads == 0


def test_streams_in_a_list_read() -> None:
    stream = pushed(begun(), 3)
    expected = torch.cat([stream.read(), random()], -1)
    assert same(torch.cat([stream, random()], -1), expected)
    assert same(torch.cat(tensors=(stream, random()), dim=-1), expected)


def test_gradients_of_reads() -> None:
    source = random().requires_grad_()
    stream = pushed(begun(value=source), 3)
    query = stream.reads.query
    (by_source, by_query) = torch.autograd.grad(F.linear(stream, MATRIX).square().sum(), [source, query])
    assert by_source.abs().sum() > 0
    # the row of position 3, and no other
    assert [bool(row.any()) for row in by_query] == [False, False, True, False, False, False]


def test_state_after_a_read_goes_on() -> None:
    stream = pushed(begun(), 3)
    after = stream + F.linear(stream, MATRIX)
    assert_close(after.total(), stream.total() + F.linear(stream.read(), MATRIX))


IN_PLACE: dict[str, Operation] = {
    "relu_": lambda x: x.relu_(),
    "setitem": lambda x: operator.setitem(x, (slice(None), 0), 0.0),
    "copy_": lambda x: x.copy_(random(seed=91)),
    "zero_": lambda x: x.zero_(),
    "clamp_": lambda x: torch.clamp_(x, -1, 1),
    "masked_fill_": lambda x: x.masked_fill_(MASK, 0.0),
    "mul_ by a tensor": lambda x: x.mul_(random()),
    "add_ of a larger tensor": lambda x: x.add_(random(3, *SHAPE)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_other_in_place_operations_are_refused(name: str) -> None:
    stream = pushed(begun(), 3)
    with pytest.raises(RefusedError, match=r"changes the residual stream in place at \S+\.py:\d+; write it out of pl"):
        IN_PLACE[name](stream)


@pytest.mark.parametrize("name", ["mul_ by a tensor", "add_ of a larger tensor"])
def test_refused_arithmetic_leaves_the_source(name: str) -> None:
    source = random()
    with pytest.raises(RefusedError):
        IN_PLACE[name](pushed(begun(value=source), 3))
    assert torch.equal(source, random())


@pytest.mark.parametrize("name", [name for name in IN_PLACE if " " not in name])
def test_refused_operations_leave_the_source(name: str) -> None:
    source = random()
    with pytest.raises(RefusedError):
        IN_PLACE[name](pushed(begun(value=source), 3))
    assert torch.equal(source, random())


def test_writing_into_a_stream_is_refused() -> None:
    stream = pushed(begun(), 1)
    with pytest.raises(
        RefusedError, match=rf"`add` writes into the residual stream by `out=` at {re.escape(__file__)}"
    ):
        torch.add(stream, random(), out=stream)


def test_in_place_activations_leave_the_source() -> None:
    source = random()
    stream = pushed(begun(value=source), 3)
    expected = F.relu(stream.read())
    assert same(F.relu(stream, inplace=True), expected)
    assert torch.equal(source, random())
    # The original would have changed the stream itself.
    with pytest.raises(RefusedError, match="by an in-place `relu`"):
        stream.read()


def in_place_add(x: Any) -> Any:
    x += random(seed=90)
    return x


def test_in_place_add_rebinds() -> None:
    stream = pushed(begun(), 2)
    expected = stream.total() + random(seed=90)
    after = in_place_add(stream)
    assert isinstance(after, Stream)
    assert after.position == 3
    assert_close(after.total(), expected)


@pytest.mark.parametrize(
    "change", [in_place_add, lambda x: x.add_(random()), lambda x: x.sub_(random()), lambda x: x.mul_(2)]
)
def test_old_value_of_an_in_place_operation_is_stale(change: Operation) -> None:
    stream = pushed(begun(), 2)
    change(stream)
    where = rf"changed in place \(by an in-place .* at {re.escape(__file__)}:\d+\)"
    for use in (lambda: stream + 1, stream.tanh, lambda: stream.view(-1), stream.read, lambda: F.relu(stream)):
        with pytest.raises(RefusedError, match=where):
            use()


VIEWS: dict[str, Operation] = {
    "row": lambda x: x[:, 0],
    "slice": lambda x: x[:, 1:],
    "view": lambda x: x.view(-1, x.shape[-1]),
    "transpose": lambda x: x.transpose(0, 1),
    "contiguous": lambda x: x.contiguous(),
    "two of them": lambda x: x.transpose(0, 1)[0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_change_in_place_reaches_what_shares_its_memory(name: str) -> None:
    stream = pushed(begun(), 2)
    view, other = VIEWS[name](stream), VIEWS[name](stream)
    after = view.add_(1.0)
    assert_close(after.total(), VIEWS[name](stream.map(lambda v: v, -1)).total() + 1.0)
    for old in (stream, other):
        with pytest.raises(RefusedError, match=rf"changed in place \(by an in-place `add_` at {re.escape(__file__)}"):
            old.read()
    stream = pushed(begun(), 2)
    VIEWS[name](stream.add_(1.0)).read()
    with pytest.raises(RefusedError, match="changed in place"):
        VIEWS[name](stream)


@pytest.mark.parametrize("copy", [lambda x: x.clone(), lambda x: x * 2, lambda x: x + 1, lambda x: x.float()])
def test_a_change_in_place_leaves_copies(copy: Operation) -> None:
    stream = pushed(begun(), 2)
    expected = copy(stream).total()
    copied = copy(stream)
    stream.add_(1.0)
    assert_close(copied.total(), expected)


@pytest.mark.parametrize("change", [lambda x: x.add_(0), lambda x: operator.iadd(x, 0)])
def test_adding_zero_in_place_changes_nothing(change: Operation) -> None:
    stream = pushed(begun(), 2)
    assert change(stream) is stream
    assert torch.equal(stream.read(), pushed(begun(), 2).read())


def test_in_place_add_to_a_clone_leaves_the_original() -> None:
    stream = pushed(begun(), 2)
    expected = stream.total()
    changed = stream.clone().add_(random(seed=90))
    assert_close(changed.total(), expected + random(seed=90))
    assert_close(stream.total(), expected)


def test_in_place_add_keeps_the_dtype() -> None:
    stream = pushed(begun(value=random(dtype=torch.float32)), 2)
    assert stream.add_(random(seed=90)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scalar_tensors_do_not_promote(dtype: torch.dtype) -> None:
    plain, number = random(dtype=dtype), torch.tensor(0.5, dtype=F64)
    assert (plain + number).dtype == dtype
    for seen in (0, 2):
        assert (pushed(begun(value=plain), seen) + number).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_do_not_promote(dtype: torch.dtype) -> None:
    stream = begun(value=random(dtype=dtype))
    for after in (stream + 1, stream + 0.5, 2 * stream, stream / 3, stream * torch.tensor(0.5, dtype=F64)):
        assert is_stream(after)
        assert after.dtype == dtype
        assert after.read().dtype == dtype


def test_integers_are_pushed_as_they_promote() -> None:
    stream = begun(value=random(dtype=torch.float32)) + torch.arange(WIDTH)
    assert stream.dtype == torch.float32
    assert_close(stream.total(), random(dtype=torch.float32) + torch.arange(WIDTH))


@pytest.mark.parametrize("operation", [lambda x, out: torch.add(x, random(seed=90), out=out)])
def test_out_argument(operation: Callable[[Any, Tensor], Any]) -> None:
    stream, out = pushed(begun(), 2), torch.empty(SHAPE, dtype=F64)
    with torch.no_grad():
        operation(stream, out)
        assert_close(out, stream.read() + random(seed=90))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.mul(input=x, other=2),
        lambda x: torch.reshape(input=x, shape=(8, WIDTH)),
        lambda x: torch.divide(x, 2),
    ],
)
def test_other_spellings_of_carried_operations(operation: Operation) -> None:
    assert is_stream(operation(pushed(begun(), 3)))


def test_requires_grad_() -> None:
    stream = pushed(begun(), 1)
    assert stream.requires_grad_() is stream
    assert all(source.requires_grad for source in stream.sources)
