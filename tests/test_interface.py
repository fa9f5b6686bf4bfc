"""What each operation on a stream does: a push, a carried state, metadata, a refusal, or a read."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attnres_compile.stream import is_stream
from tests.stream_material import SHAPE, WIDTH, Count, begun, expected_read, pushed, random, sources_of
from tests.tolerances import assert_close

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
Operation = Callable[[Any], Any]
BRANCH = random(seed=80)
MATRIX = random(WIDTH, WIDTH, seed=81)
HALF = torch.tensor(0.5, dtype=F64)

ADDITIONS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Tensor], Any]]] = {
    "x + f": (lambda x, f: x + f, lambda f: f),
    "f + x": (lambda x, f: f + x, lambda f: f),
    "torch.add": (lambda x, f: torch.add(x, f), lambda f: f),
    "torch.add, stream second": (lambda x, f: torch.add(f, x), lambda f: f),
    "torch.add by keyword": (lambda x, f: torch.add(input=x, other=f), lambda f: f),
    "method": (lambda x, f: x.add(f), lambda f: f),
    "method of the branch": (lambda x, f: f.add(x), lambda f: f),
    "alpha": (lambda x, f: torch.add(x, f, alpha=0.5), lambda f: 0.5 * f),
    "x - f": (lambda x, f: x - f, lambda f: -f),
    "torch.sub": (lambda x, f: torch.sub(x, f), lambda f: -f),
    "subtract, alpha": (lambda x, f: torch.subtract(x, f, alpha=2), lambda f: -2 * f),
    "addcmul": (lambda x, f: torch.addcmul(x, f, f), lambda f: f * f),
    "addcmul, value": (lambda x, f: x.addcmul(f, f, value=0.5), lambda f: 0.5 * f * f),
    "addcdiv": (lambda x, f: torch.addcdiv(x, f, 2 + f * f), lambda f: f / (2 + f * f)),
    "baddbmm": (lambda x, f: torch.baddbmm(x, f, MATRIX.expand(2, -1, -1)), lambda f: f @ MATRIX),
    "operator.iadd": (lambda x, f: operator.iadd(x, f), lambda f: f),
    "add_": (lambda x, f: x.add_(f), lambda f: f),
    "sub_": (lambda x, f: x.sub_(f), lambda f: -f),
    "addcmul_": (lambda x, f: x.addcmul_(f, f), lambda f: f * f),
    "number": (lambda x, f: x + 3, lambda f: torch.full(SHAPE, 3, dtype=F64)),
    "number first": (lambda x, f: 3 + x, lambda f: torch.full(SHAPE, 3, dtype=F64)),
    "minus number": (lambda x, f: x - 0.25, lambda f: torch.full(SHAPE, -0.25, dtype=F64)),
    "scalar tensor": (lambda x, f: x + f.mean(), lambda f: f.mean().expand(SHAPE)),
    "one row": (lambda x, f: x + f[0, 0], lambda f: f[0, 0].expand(SHAPE)),
    "one token": (lambda x, f: f[:, :1] + x, lambda f: f[:, :1].expand(SHAPE)),
}


@pytest.mark.parametrize("seen", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ADDITIONS)
def test_additions_push(name: str, seen: int) -> None:
    operation, branch = ADDITIONS[name]
    before = [random(seed=position) for position in range(1, seen + 1)]
    stream = pushed(begun(), seen)
    plain = stream.total().clone()
    after = operation(stream, BRANCH)
    assert is_stream(after)
    assert after.position == seen + 1
    sources = sources_of(after, [*before, branch(BRANCH)], random())
    assert_close(after.read(), expected_read(after, sources, seen))
    assert_close(after.total(), operation(plain, BRANCH))


def test_addmm() -> None:
    stream = pushed(begun(value=random(8, WIDTH)), 3)
    left = random(8, 3, seed=82)
    right = random(3, WIDTH, seed=83)
    results: list[Any] = [torch.addmm(stream, left, right), stream.addmm(left, right, alpha=1)]
    for after in results:
        assert is_stream(after)
        before = [random(8, WIDTH, seed=position) for position in range(1, 4)]
        sources = sources_of(after, [*before, left @ right], random(8, WIDTH))
        assert_close(after.read(), expected_read(after, sources, 3))


def test_zero_is_no_push() -> None:
    stream = pushed(begun(), 3)
    assert (stream + 0) is stream
    assert (0 + stream) is stream
    total: Any = sum([stream, BRANCH])
    assert is_stream(total)
    assert total.position == 4


@pytest.mark.parametrize(
    "operation",
    [
        # no stream of the result's shape goes on
        lambda x: x + random(3, *SHAPE, seed=84),
        lambda x: random(3, 1, 1, 1, seed=84) + x,
        # constant along the features: the mean of a hand-written norm
        lambda x: x - x.mean(-1, keepdim=True),
        lambda x: x + BRANCH[..., :1],
        lambda x: BRANCH - x,
        lambda x: torch.addcmul(BRANCH, x, x),
        lambda x: torch.addmm(x[0], BRANCH[0], MATRIX, beta=0.5),
    ],
)
def test_additions_that_read(operation: Operation) -> None:
    stream = pushed(begun(), 3)
    result = operation(stream)
    assert not is_stream(result)
    if "addmm" not in operation.__code__.co_names:
        assert_close(result, operation(stream.read()))


def test_sum_with_an_older_state() -> None:
    """The latest state goes on, on whichever side; the older one is read."""
    old = pushed(begun(), 2)
    new = pushed(old, 1)
    for after in (new + old, old + new):
        assert is_stream(after)
        assert after.position == 4
        assert_close(after.total(), new.total() + old.read())


def test_sum_of_two_streams_reads_both() -> None:
    a, b = pushed(begun(), 3), pushed(begun(chain=1), 2)
    assert not is_stream(a + b)
    assert_close(a + b, a.read() + b.read())


CARRIED: dict[str, Operation] = {
    "x * 2": lambda x: x * 2,
    "2 * x": lambda x: 2 * x,
    "x * scalar tensor": lambda x: x * HALF,
    "scalar tensor * x": lambda x: HALF * x,
    "torch.mul": lambda x: torch.mul(x, 0.5),
    "x / 3": lambda x: x / 3,
    "torch.div": lambda x: torch.div(x, HALF),
    "-x": lambda x: -x,
    "mul_": lambda x: x.mul_(2),
    "operator.itruediv": lambda x: operator.itruediv(x, 2),
    "reshape to tokens": lambda x: x.reshape(-1, WIDTH),
    "view": lambda x: x.view(2, 2, 2, WIDTH),
    "flatten": lambda x: x.flatten(0, 1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "view_as": lambda x: x.view_as(random(8, WIDTH)),
    "slice": lambda x: x[:, ::2],
    "one token": lambda x: x[:, 0],
    "first sample": lambda x: x[0],
    "ellipsis": lambda x: x[:, -1:, ...],
    "None": lambda x: x[:, None],
    "all": lambda x: x[:, :2, :],
    "tokens by index": lambda x: x[:, torch.tensor([2, 0])],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "select": lambda x: x.select(1, 1),
    "index_select": lambda x: x.index_select(1, torch.tensor([2, 0])),
    "expand": lambda x: x[:, :1].expand(2, 3, WIDTH),
    "transpose tokens": lambda x: x.transpose(0, 1),
    "transpose": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "permute, negative": lambda x: x.permute(0, -1, -2),
    "movedim": lambda x: x.movedim(-1, 1),
    "there and back": lambda x: x.transpose(1, 2).transpose(1, 2),
    "reshape and back": lambda x: x.reshape(-1, WIDTH).view(2, 4, WIDTH),
    "dropout in eval": lambda x: F.dropout(x, 0.5, False),
    "clone": lambda x: x.clone(),
    "contiguous copy": lambda x: x.transpose(0, 1).clone(memory_format=torch.contiguous_format),
    "contiguous again": lambda x: x.permute(2, 0, 1).contiguous(),
    "view of a contiguous form": lambda x: x.transpose(0, 1).contiguous().view(-1, WIDTH),
    "contiguous": lambda x: x.contiguous(),
    "to its dtype": lambda x: x.to(F64),
    "to its device": lambda x: x.to("cpu"),
}


@pytest.mark.parametrize("seen", [1, 2, 3, 5])
@pytest.mark.parametrize("name", CARRIED)
def test_carried(name: str, seen: int) -> None:
    operation = CARRIED[name]
    with torch.no_grad():
        stream = pushed(begun(value=random()), seen)
        plain = stream.total().clone()
        sources = [operation(source.clone()) for source in stream.sources]
        moved = operation(stream)
        assert is_stream(moved)
        assert moved.position == seen
        assert tuple(moved.shape) == tuple(sources[0].shape)
        expected = operation(plain)
        assert_close(moved.total(), expected)
        last = [source.movedim(moved.axis, -1) for source in sources]
        assert_close(moved.read(), expected_read(moved, last, seen - 1).movedim(-1, moved.axis))
        assert moved.read().is_contiguous() or not expected.is_contiguous()
        branch = random(*moved.shape, seed=85)
        assert_close((moved + branch).total(), expected + branch)


@pytest.mark.parametrize(
    "view", [lambda x: x.view(-1, WIDTH), lambda x: x.view(size=(8, WIDTH)), lambda x: x.view_as(random(8, WIDTH))]
)
@pytest.mark.parametrize("seen", [1, 2, 4])
def test_branches_with_other_strides(view: Operation, seen: int) -> None:
    """A model may view the sum, whatever strides the branches have."""
    stream = begun()
    plain = stream.total().clone()
    for position in range(1, 1 + seen):
        branch = random(*SHAPE, seed=position).transpose(0, 1).contiguous().transpose(0, 1)
        assert not branch.is_contiguous()
        stream, plain = stream + branch, plain + branch
    viewed = view(stream)
    assert_close(viewed.total(), view(plain))


@pytest.mark.parametrize("seen", [1, 3])
def test_other_bits_are_read(seen: int) -> None:
    stream = pushed(begun(), seen)
    for bits in (stream.view(torch.int64), stream.view(dtype=torch.int64)):
        assert torch.equal(bits, stream.read().view(torch.int64))


@pytest.mark.parametrize(("dtype", "operation"), [(F32, lambda x: x.float()), (BF16, lambda x: x.to(BF16))])
@pytest.mark.parametrize("seen", [1, 3])
def test_casts(dtype: torch.dtype, operation: Operation, seen: int) -> None:
    stream = pushed(begun(), seen)
    cast = operation(stream)
    assert is_stream(cast)
    assert cast.dtype == cast.read().dtype == dtype
    sources = [source.to(dtype).double() for source in stream.sources]
    assert_close(cast.read(), expected_read(cast, sources, seen - 1))
    assert cast.type_as(random(dtype=F64)).dtype == F64


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_factors_of_one_element_are_carried(shape: tuple[int, ...]) -> None:
    stream, factor = pushed(begun(), 3), torch.full(shape, 1.5, dtype=F64)
    for scaled, number in ((stream * factor, 1.5), (factor * stream, 1.5), (stream / factor, 1 / 1.5)):
        assert is_stream(scaled)
        assert_close(scaled.read(), expected_read(scaled, [source * number for source in stream.sources], 2))


@pytest.mark.parametrize("factor", [lambda: random(WIDTH), lambda: random(2, 1, 1), lambda: random(1, 1, 1, 1)])
def test_factors_of_more_than_one_number_read(factor: Callable[[], Tensor]) -> None:
    stream = pushed(begun(), 3)
    for operation in (lambda x: x * factor(), lambda x: factor() * x, lambda x: x / factor()):
        assert_close(operation(stream), operation(stream.read()))


def test_phase_statistics_outlive_a_reshape() -> None:
    """The finished blocks of a flattened stream are not read again, and those of the restored one are as they were."""
    stream = pushed(begun((1, 3, 2)), 2)
    assert stream.phase is not None
    with Count() as count:
        flat = stream.reshape(-1, WIDTH)
        values = [flat.read(), (flat + BRANCH.view(-1, WIDTH)).read()]
        back = (flat + BRANCH.view(-1, WIDTH)).view(SHAPE)
        values.append(back.read())
    assert count.seen["inter_block"] == count.seen["depth_attention"] == 0
    assert back.blocks[0] is stream.blocks[0]
    after = stream + BRANCH
    for actual, expected in zip(values, (stream.read(), after.read(), after.read()), strict=True):
        assert_close(actual.view(SHAPE), expected)


@pytest.mark.parametrize("pushes", [0, 1, 2, 4])
@pytest.mark.parametrize("sizes", [(1, 2, 2, 1), (2, 3, 1), (1, 1, 4)])
def test_blocks_that_close_between_reshapes(sizes: tuple[int, ...], pushes: int) -> None:
    stream = pushed(begun(sizes), 1)
    flat, plain = stream.reshape(-1, WIDTH), stream
    for position in range(2, 2 + pushes):
        branch = random(seed=position)
        flat, plain = flat + branch.reshape(-1, WIDTH), plain + branch
    back = flat.reshape(2, 4, WIDTH)
    assert_close(back.read(), plain.read())
    assert_close((back + BRANCH).read(), (plain + BRANCH).read())


@pytest.mark.parametrize(
    "pushes",
    [0, 1, 2, 4],
)
def test_channels_first_reshapes(pushes: int) -> None:
    """`[batch, features, tokens]` is reshaped to the shape that it has, as convolution codes do."""
    shape = (2, WIDTH, 4)
    stream = begun((1, 2, 2, 1), random(*shape), -2)
    plain = stream
    stream = stream.view(shape)
    for position in range(1, 1 + pushes):
        branch = random(*shape, seed=position)
        stream, plain = stream + branch, plain + branch
    assert_close(stream.view(shape).read(), plain.read())


@pytest.mark.parametrize("pushes", [0, 1, 2, 4])
def test_channels_first_maps_and_tokens(pushes: int) -> None:
    """`[batch, features, height, width]` becomes `[batch, tokens, features]` and a map again."""
    shape = (2, WIDTH, 2, 2)
    stream = begun((1, 2, 2, 1), random(*shape), -3)
    plain = stream
    stream = stream.flatten(2).transpose(1, 2)
    for position in range(1, 1 + pushes):
        branch = random(*shape, seed=position)
        stream, plain = stream + branch.flatten(2).transpose(1, 2), plain + branch
    assert stream.axis == -1
    back = stream.transpose(1, 2).view(shape)
    assert back.axis == -3
    assert_close(back.read(), plain.read())
    direct = plain.flatten(2)
    assert direct.axis == -2
    assert direct.unflatten(2, (2, 2)).axis == -3
    assert_close(direct.unflatten(2, (2, 2)).read(), plain.read())


@pytest.mark.parametrize("seen", [1, 3, 4])
@pytest.mark.parametrize(
    "operation", [lambda x: F.dropout(x, 0.4, True), torch.nn.Dropout(0.4), lambda x: torch.dropout(x, 0.4, True)]
)
def test_dropout_draws_what_the_sum_would(seen: int, operation: Operation) -> None:
    stream = pushed(begun(), seen)
    plain = stream.total()
    torch.manual_seed(3)
    dropped, after = operation(stream), torch.rand(3)
    torch.manual_seed(3)
    expected, then = operation(plain), torch.rand(3)
    assert is_stream(dropped)
    assert dropped.position == seen
    assert_close(dropped.total(), expected)
    assert 0 < int((expected == 0).sum()) < expected.numel()
    assert torch.equal(after, then)


@pytest.mark.parametrize(
    "operation",
    [
        torch.rand_like,
        torch.randn_like,
        lambda x: F.feature_alpha_dropout(x, 0.5, True),
        lambda x: F.dropout1d(x, 0.5, True),
        lambda x: F.rrelu(x, training=True),
    ],
)
def test_random_operations_draw_once(operation: Operation) -> None:
    stream = pushed(begun(), 3)
    torch.manual_seed(3)
    drawn, after = operation(stream), torch.rand(3)
    torch.manual_seed(3)
    expected, then = operation(stream.read()), torch.rand(3)
    assert torch.equal(after, then)
    assert torch.equal(drawn, expected)


METADATA: list[Operation] = [
    lambda x: x.shape,
    lambda x: x.size(),
    lambda x: x.size(-1),
    lambda x: x.dim(),
    lambda x: x.ndim,
    lambda x: x.ndimension(),
    lambda x: x.numel(),
    lambda x: x.nelement(),
    lambda x: x.stride(),
    lambda x: x.is_contiguous(),
    lambda x: x.is_floating_point(),
    torch.is_floating_point,
    lambda x: x.is_complex(),
    lambda x: x.element_size(),
    lambda x: x.get_device(),
    lambda x: x.dtype,
    lambda x: x.device,
    lambda x: len(x),
    lambda x: x.requires_grad,
    torch.is_tensor,
    lambda x: isinstance(x, Tensor),
    torch.numel,
]


@pytest.mark.parametrize("operation", METADATA)
@pytest.mark.parametrize("seen", [0, 3, 4])
def test_metadata_never_reads(operation: Operation, seen: int) -> None:
    stream = pushed(begun(), seen)
    plain = stream.total()
    with Count() as count:
        answer = operation(stream)
    assert answer == operation(plain)
    assert not count.seen


@pytest.mark.parametrize(
    "operation",
    [lambda x: x.is_cuda, lambda x: x.layout, lambda x: x.is_sparse, lambda x: x.itemsize, lambda x: x.is_leaf],
)
def test_attributes_never_read(operation: Operation) -> None:
    stream = pushed(begun(), 3)
    with Count() as count:
        answer = operation(stream)
    assert answer == operation(stream.total())
    assert not count.seen
