"""Nested graphs of gradient mode, checkpoint and autocast regions become part of the graph around them."""

import operator

import pytest
import torch
from torch import Tensor, fx, nn

from attnres_compile.capture.trace import Captured
from attnres_compile.passes.inline_regions import InlineRegions
from tests.passes.models import WIDTH
from tests.passes.tracing import example, exported, listing, operations, subject
from tests.tolerances import assert_close


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.arange(float(WIDTH)))


class TwoResults(Region):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x.tanh()
            z = y * 2
        return self.linear(y) + z


class Constants(Region):
    shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x + self.shift + torch.tensor([0.5] * WIDTH)
        return self.linear(y)


class GradientInside(Region):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.linear(x)
            with torch.enable_grad():
                z = y * 2
            return y + z


class Unused(Region):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.tanh()
        return self.linear(x)


class Autocast(Region):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
        return y.float() + x


def captured(model: nn.Module) -> Captured:
    torch.manual_seed(0)
    return exported(model, example(2, WIDTH))


def regions(module: fx.GraphModule) -> list[str]:
    return [name for name in operations(module) if name.startswith(("wrap_with", "tag_activation"))]


def output(found: Captured) -> Tensor:
    result: Tensor = found.module(*found.inputs)[0]
    return result


def test_listing_before_and_after() -> None:
    module = captured(TwoResults()).module
    assert listing(module) == [
        "wrap_with_set_grad_enabled = wrap_with_set_grad_enabled(x)",
        "tanh = getitem(wrap_with_set_grad_enabled, 0)",
        "mul = getitem(wrap_with_set_grad_enabled, 1)",
        "linear = linear(tanh)",
        "add = add.Tensor(linear, mul)",
        "output = output([add])",
    ]
    assert InlineRegions()(subject(module))
    module.graph.lint()
    assert listing(module) == [
        "tanh_1 = tanh(x)",
        "mul_1 = mul.Tensor(tanh_1, 2)",
        "linear = linear(tanh_1)",
        "add = add.Tensor(linear, mul_1)",
        "output = output([add])",
    ]
    # the region's graph is no longer used
    assert not [node for node in module.graph.nodes if node.op == "get_attr"]


@pytest.mark.parametrize("model", [TwoResults, Constants, GradientInside, Unused])
def test_values_stay(model: type[Region]) -> None:
    found = captured(model())
    assert regions(found.module)
    before = output(found)
    assert InlineRegions()(subject(found.module))
    assert not regions(found.module)
    assert_close(output(found), before)


@pytest.mark.parametrize("model", [TwoResults, Autocast])
def test_second_run_changes_nothing(model: type[Region]) -> None:
    found = subject(captured(model()).module)
    assert InlineRegions(autocast=True)(found)
    text = str(found.module.graph)
    assert not InlineRegions(autocast=True)(found)
    assert str(found.module.graph) == text


def test_nothing_to_inline() -> None:
    found = subject(captured(nn.Sequential(nn.Linear(WIDTH, WIDTH))).module)
    text = str(found.module.graph)
    assert not InlineRegions(autocast=True)(found)
    assert str(found.module.graph) == text


def test_autocast_stays_where_the_graph_will_run() -> None:
    found = captured(Autocast())
    before = output(found)
    assert not InlineRegions()(subject(found.module))
    assert len(regions(found.module)) == 1
    assert_close(output(found), before)
    assert InlineRegions(autocast=True)(subject(found.module))
    assert not regions(found.module)


def test_copies_keep_their_place_in_the_source() -> None:
    found = captured(TwoResults())
    InlineRegions()(subject(found.module))
    copies = {node.name: node for node in found.module.graph.nodes if node.name in ("tanh_1", "mul_1")}
    assert len(copies) == 2
    for name, code in (("tanh_1", "y = x.tanh()"), ("mul_1", "z = y * 2")):
        meta = copies[name].meta
        assert code in meta["stack_trace"]
        assert meta["nn_module_stack"]
        assert tuple(meta["val"].shape) == (2, WIDTH)


def nested(region: object) -> fx.GraphModule:
    """`region(inner(x) * 2)`, where inner is a region as well; built by hand since torch.export flattens them."""

    def body(make: object) -> fx.GraphModule:
        graph = fx.Graph()
        x = graph.placeholder("x")
        root = nn.Module()
        if make is None:
            result = graph.call_function(torch.ops.aten.tanh.default, (x,))
        else:
            root.add_module("inner", body(None))
            inner = graph.call_function(make, (graph.get_attr("inner"), x))  # type: ignore[arg-type]
            result = graph.call_function(
                torch.ops.aten.mul.Tensor, (graph.call_function(operator.getitem, (inner, 0)), 2)
            )
        graph.output((result,))
        return fx.GraphModule(root, graph)

    root, graph = nn.Module(), fx.Graph()
    root.add_module("outer", body(region))
    x = graph.placeholder("x")
    # two visits of one body
    first = graph.call_function(region, (graph.get_attr("outer"), x))  # type: ignore[arg-type]
    middle = graph.call_function(operator.getitem, (first, 0))
    second = graph.call_function(region, (graph.get_attr("outer"), middle))  # type: ignore[arg-type]
    graph.output(graph.call_function(operator.getitem, (second, 0)))
    return fx.GraphModule(root, graph)


def test_regions_in_regions() -> None:
    module, x = nested(torch.ops.higher_order.tag_activation_checkpoint), example(2, 3)
    before = module(x)
    assert_close(before, ((x.tanh() * 2).tanh() * 2))
    found = subject(module)
    assert InlineRegions()(found)
    module.graph.lint()
    assert operations(module) == ["aten.tanh.default", "aten.mul.Tensor"] * 2
    assert torch.equal(module(x), before)
    assert not InlineRegions()(found)
