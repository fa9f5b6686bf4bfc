"""Merges take in the add before and the norm after: which norms are known, what is left, and the same numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from attnres_compile.passes._emit import STAMP
from attnres_compile.passes.base import run
from attnres_compile.passes.fuse_neighbours import NAME, FuseNeighbours
from attnres_compile.passes.schedule_two_phase import ScheduleTwoPhase
from tests.passes.models import WIDTH
from tests.passes.reads import (
    EPS,
    OPS,
    SIZES,
    Graph,
    Plain,
    aten_row,
    check,
    count,
    graph,
    outcome,
    seeded,
    untouched,
)
from tests.passes.tracing import listing, subject
from tests.tolerances import assert_close

FRONT_ENDS = pytest.mark.parametrize("front_end", ["export", "dynamo"])


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))


class Llama(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class T5(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            x = x.to(self.weight.dtype)
        return self.weight * x


class Gemma(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1.0 + self.weight.float())).type_as(x)


class Gemma3(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        y = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5)
        return (y * (self.weight.float() + 1)).type_as(x)


class Plainly(Weighted):
    """Without casts, and the operands the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.rsqrt(1e-6 + (x * x).mean(-1, keepdim=True)) * x) * self.weight + 2 * self.weight


class Called(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


def called(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Called(function)


# In float64 a cast to float32 is part of the model: those are compared in float32.
NORMS: dict[str, tuple[Callable[[], nn.Module], torch.dtype]] = {
    "nn.RMSNorm": (lambda: nn.RMSNorm(WIDTH), torch.float64),
    "F.rms_norm": (called(lambda x, w, b: F.rms_norm(x, [WIDTH], w, 1e-5)), torch.float64),
    "rms_norm by name": (called(lambda x, w, b: F.rms_norm(x, normalized_shape=(WIDTH,), eps=1e-5)), torch.float64),
    "aten.rms_norm": (called(lambda x, w, b: torch.ops.aten.rms_norm.default(x, [WIDTH], w)), torch.float64),
    "nn.LayerNorm": (lambda: nn.LayerNorm(WIDTH), torch.float64),
    "layer_norm": (called(lambda x, w, b: F.layer_norm(x, [WIDTH])), torch.float64),
    "layer_norm, weight": (called(lambda x, w, b: F.layer_norm(x, [WIDTH], w)), torch.float64),
    "layer_norm, bias": (called(lambda x, w, b: F.layer_norm(x, [WIDTH], bias=b, eps=1e-3)), torch.float64),
    "plain": (Plainly, torch.float64),
    "llama": (Llama, torch.float32),
    "t5": (T5, torch.float32),
    "gemma": (Gemma, torch.float32),
    "gemma3": (Gemma3, torch.float32),
}


class Phases(nn.Module):
    """Two blocks, and what a subclass makes of their first phase of two reads."""

    def __init__(self, norm: Callable[[], nn.Module] = lambda: nn.RMSNorm(WIDTH, eps=1e-5)) -> None:
        super().__init__()
        self.query, self.key_norm = (nn.Parameter(torch.randn(2, WIDTH)) for _ in range(2))
        self.norm = norm()

    def statistics(self, x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        blocks = [x, x.sin()]
        results = OPS.inter_block.default(blocks, self.query, self.key_norm, EPS)
        return list(zip(*(torch.ops.aten.unbind.int(value) for value in results), strict=True))

    def merged(self, x: Tensor, partial: Tensor | None, row: int = 1) -> Tensor:
        own = (None, None) if partial is None else (aten_row(self.query, row), aten_row(self.key_norm, row))
        scale = 2.0 if partial is None else 3.0
        result: Tensor = OPS.merge.default(*self.statistics(x)[row], partial, *own, EPS, scale)
        return result

    def partial(self, x: Tensor) -> Tensor:
        return torch.ops.aten.add.Tensor(x.tanh(), x.tan())

    def forward(self, x: Tensor) -> Any:
        partial = self.partial(x)
        return partial, self.norm(self.merged(x, partial))


def fused(
    make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64, front_end: str = "export"
) -> fx.GraphModule:
    return check(graph(seeded(make, dtype), front_end=front_end), FuseNeighbours())


def left(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> None:
    untouched(graph(seeded(make, dtype)), FuseNeighbours())


def found(module: fx.GraphModule, target: Any) -> fx.Node:
    (node,) = module.graph.find_nodes(op="call_function", target=target)
    return node


def test_listing() -> None:
    def shown(module: fx.GraphModule) -> list[str]:
        return [line for line in listing(module) if " = getitem(inter" not in line and "unbind" not in line]

    found = graph(seeded(Phases))
    before = [
        "tanh = tanh(x)",
        "tan = tan(x)",
        "add = add.Tensor(tanh, tan)",
        "select = select.int(0, 1)",
        "select_1 = select.int(0, 1)",
        "sin = sin(x)",
        "inter_block = inter_block([x, sin], 0.001)",
        "merge = merge(getitem_4, getitem_6, getitem_8, add, select, select_1, 0.001, 3.0)",
        "rms_norm = rms_norm(merge, [8], 1e-05)",
        "output = output([add, rms_norm])",
    ]
    assert shown(found[0]) == before
    del before[2]
    assert shown(check(found, FuseNeighbours())) == [
        *before[:-3],
        "add_merge_norm_default = add_merge_norm(tanh, tan, [x, sin], getitem_4, getitem_6, getitem_8, select, "
        "select_1, 0.001, 1e-05, 3.0)",
        # The graph's outputs keep their names.
        "add = getitem(add_merge_norm_default, 0)",
        "rms_norm = getitem(add_merge_norm_default, 1)",
        "output = output([add, rms_norm])",
    ]


@FRONT_ENDS
@pytest.mark.parametrize("name", NORMS)
def test_norms_that_are_known(name: str, front_end: str) -> None:
    norm, dtype = NORMS[name]
    module = fused(lambda: Phases(norm), dtype, front_end)
    assert count(module) == {"inter_block": 1, "add_merge_norm": 1}
    node = found(module, OPS.add_merge_norm.default)
    assert node.args[-1] == ("layer" if "ayer" in name else "rms")
    assert {n.meta[STAMP] for n in module.graph.nodes if STAMP in n.meta} == {NAME}
    assert not any(n.op == "call_method" for n in module.graph.nodes if n.args and n.args[0] is node)


@FRONT_ENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_half_precision(name: str, dtype: torch.dtype, front_end: str) -> None:
    norm, _ = NORMS[name]
    module, inputs = graph(seeded(lambda: Phases(norm), dtype), front_end=front_end)
    if front_end == "export":
        # of the size of the norms' eps, so that another one shows
        inputs[-1] = inputs[-1] * 2e-3
    expected = module(*inputs)
    run((FuseNeighbours(),), subject(module))
    assert count(module) == {"inter_block": 1, "add_merge_norm": 1}
    for a, e in zip(module(*inputs), expected, strict=True):
        assert a.dtype == e.dtype == dtype
        assert_close(a, e)


class NoAdd(Phases):
    def forward(self, x: Tensor) -> Any:
        return self.norm(self.merged(x, x.cos()))


class FirstRead(Phases):
    def forward(self, x: Tensor) -> Any:
        h = self.merged(x, None)
        return self.norm(h if h.dtype == x.dtype else torch.ops.aten.to.dtype(h, x.dtype))


class UsedBefore(Phases):
    def forward(self, x: Tensor) -> Any:
        partial = self.partial(x)
        h = self.merged(x, partial)
        other = partial.exp()
        return other, self.norm(h)


class UsedAfter(Phases):
    def forward(self, x: Tensor) -> Any:
        partial = self.partial(x)
        y = self.norm(self.merged(x, partial))
        return partial.exp() + y


class Broadcast(Phases):
    def partial(self, x: Tensor) -> Tensor:
        return torch.ops.aten.add.Tensor(x.cos(), self.query[0])


class Scaled(Phases):
    def partial(self, x: Tensor) -> Tensor:
        return torch.ops.aten.add.Tensor(x.cos(), x.tan(), alpha=2)


class NotTheLast(Phases):
    def forward(self, x: Tensor) -> Any:
        y = self.norm(self.merged(x, self.partial(x), 0))
        return y, self.norm(self.merged(x, None))


@FRONT_ENDS
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (NoAdd, {"merge_norm": 1}),
        (FirstRead, {"merge_norm": 1}),
        (UsedBefore, {"merge_norm": 1}),
        (Broadcast, {"merge_norm": 1}),
        (Scaled, {"merge_norm": 1}),
        (UsedAfter, {"add_merge_norm": 1}),
    ],
)
def test_the_add_before(make: Callable[[], nn.Module], expected: dict[str, int], front_end: str) -> None:
    assert count(fused(make, front_end=front_end)) == {"inter_block": 1} | expected


def test_a_first_read_gets_its_row_for_the_gradient() -> None:
    node = found(fused(FirstRead), OPS.merge_norm.default)
    query, key_norm = node.args[5:7]
    assert isinstance(query, fx.Node)
    assert isinstance(key_norm, fx.Node)
    assert (query.target, query.args[1:]) == (torch.ops.aten.select.int, (0, 1))
    assert (key_norm.target, key_norm.args[1:]) == (torch.ops.aten.select.int, (0, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_first_read_in_the_dtype_of_the_stream(dtype: torch.dtype) -> None:
    module, inputs = graph(seeded(FirstRead, dtype))
    expected = module(*inputs)[0]
    run((FuseNeighbours(),), subject(module))
    assert count(module) == {"inter_block": 1, "merge_norm": 1}
    assert_close(module(*inputs)[0], expected)


class TwoReaders(Phases):
    def forward(self, x: Tensor) -> Any:
        h = self.merged(x, self.partial(x))
        return h, self.norm(h)


class OtherWidth(Phases):
    def forward(self, x: Tensor) -> Any:
        h = self.merged(x, self.partial(x))
        return F.layer_norm(h, [3, WIDTH])


class MeanOverTokens(Phases):
    def forward(self, x: Tensor) -> Any:
        h = self.merged(x, self.partial(x))
        return h * torch.rsqrt(h.square().mean(1, keepdim=True) + 1e-6)


class ChangesDtype(Phases):
    def forward(self, x: Tensor) -> Any:
        h = self.merged(x, self.partial(x))
        return F.rms_norm(h.to(torch.float32), [WIDTH])


class InPlaceBetween(Phases):
    def forward(self, x: Tensor) -> Any:
        branch = x.tan()
        h = self.merged(x, x.cos() + branch)
        branch.mul_(2)
        return branch, self.norm(h)


class Reshaped(Phases):
    def forward(self, x: Tensor) -> Any:
        o, m, l = (value.flatten(0, 1) for value in self.statistics(x)[1])
        own = aten_row(self.query, 1), aten_row(self.key_norm, 1)
        return self.norm(OPS.merge.default(o, m, l, self.partial(x).flatten(0, 1), *own, EPS, 3.0))


class NoNorm(Phases):
    def forward(self, x: Tensor) -> Any:
        h = self.merged(x, self.partial(x))
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + h.square().mean(-1, keepdim=True))


class MeanIsUsed(Phases):
    def forward(self, x: Tensor) -> Any:
        h = self.merged(x, self.partial(x))
        mean = h.square().mean(-1, keepdim=True)
        return mean, h * torch.rsqrt(mean + 1e-6)


@pytest.mark.parametrize(
    "make",
    [TwoReaders, OtherWidth, MeanOverTokens, ChangesDtype, InPlaceBetween, Reshaped, NoNorm, MeanIsUsed],
)
def test_left_as_it_is(make: Callable[[], nn.Module]) -> None:
    left(make)


@pytest.mark.parametrize("norm", [Llama, T5, Gemma, Gemma3])
def test_casts_to_float32_in_float64_are_left(norm: Callable[[], nn.Module]) -> None:
    left(lambda: Phases(norm))


def test_a_cast_after_the_norm_stays() -> None:
    class Cast(Phases):
        def forward(self, x: Tensor) -> Any:
            return Plainly.forward(self.norm, self.merged(x, self.partial(x))).to(torch.bfloat16)  # type: ignore[arg-type]

    module = fused(lambda: Cast(Plainly), torch.float32)
    node = found(module, OPS.add_merge_norm.default)
    assert node.meta["val"][1].dtype == torch.float32
    assert any(n.target is torch.ops.aten.to.dtype for n in module.graph.nodes)


FUSED: dict[tuple[int, ...], dict[str, int]] = {
    # blocks of one are first reads and second ones: never an add before
    (1, 1, 1, 1, 1): {"inter_block": 2, "merge_norm": 4, "depth_attention": 1},
    (2, 2, 1): {"inter_block": 1, "merge_norm": 2, "add_merge_norm": 1, "depth_attention": 2},
    (3, 2): {"inter_block": 1, "merge_norm": 2, "add_merge_norm": 1, "depth_attention": 2},
    (1, 3, 1): {"inter_block": 1, "merge_norm": 2, "add_merge_norm": 2, "depth_attention": 1},
    (1, 4): {"inter_block": 1, "merge_norm": 2, "add_merge_norm": 3},
    (5,): {"depth_attention": 5},
}


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(WIDTH), lambda: nn.RMSNorm(WIDTH)], ids=["layer", "rms"])
@pytest.mark.parametrize("key_norm", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_blocks(sizes: tuple[int, ...], key_norm: bool, norm: Callable[[], nn.Module]) -> None:
    def model() -> Graph:
        return graph(seeded(lambda: Plain(sizes, norm, key_norm=key_norm)))

    module, inputs = model()
    expected = outcome((module, inputs))
    # every parameter has a gradient, and so has the input
    assert len(expected) == len([n for n in module.graph.nodes if n.op == "placeholder"]) + 1
    assert count(check((module, inputs), ScheduleTwoPhase(), FuseNeighbours())) == FUSED[sizes]


def test_the_place_is_that_of_the_norm() -> None:
    module, _ = graph(seeded(Phases))
    norm = next(n for n in module.graph.nodes if n.target is torch.ops.aten.rms_norm.default)
    trace, stack = norm.meta["stack_trace"], norm.meta["nn_module_stack"]
    run((FuseNeighbours(),), subject(module))
    node = found(module, OPS.add_merge_norm.default)
    assert (node.meta["stack_trace"], node.meta["nn_module_stack"]) == (trace, stack)
