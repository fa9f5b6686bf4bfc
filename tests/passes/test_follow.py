"""What a stream does at each node: a push, a carried state, metadata, or a read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from attnres_compile.chains import ResidualChain
from attnres_compile.passes import _nodes
from attnres_compile.passes.follow import EXIT, Boundaries, changes_nothing, follow
from attnres_compile.passes.starts import Source
from tests.passes import models
from tests.passes.models import WIDTH, Net
from tests.passes.tracing import example, exported, traced

NONE = Boundaries({}, {})
Function = Callable[[Tensor, Tensor], Any]


class Calls(nn.Module):
    """Calls a function of the stream and of another tensor of its shape."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


def exported_graph(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    return exported(model, *inputs).module


FRONT_ENDS = {"export": exported_graph, "symbolic": traced}
either = pytest.mark.parametrize("graph", FRONT_ENDS.values(), ids=FRONT_ENDS.keys())


def placeholder(module: fx.GraphModule, name: str = "x") -> fx.Node:
    return next(node for node in module.graph.nodes if node.op == "placeholder" and node.name == name)


def walked(graph: Callable[..., fx.GraphModule], function: Function, axis: int = -1) -> ResidualChain:
    """The chain that starts at the function's first argument `[2, 5, 8]`."""
    module = graph(Calls(function), example(2, 5, WIDTH), example(2, 5, WIDTH, seed=1))
    (chain,) = follow(module, {placeholder(module): Source(axis, None)}, NONE)
    return chain


def pushed(chain: ResidualChain) -> list[int]:
    return [push.position for push in chain.pushes]


@either
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x + y,
        lambda x, y: y + x,
        lambda x, y: x - y,
        lambda x, y: torch.add(x, y, alpha=0.5),
        lambda x, y: torch.sub(x, y),
        lambda x, y: x.add(y),
        lambda x, y: torch.addcmul(x, y, y),
        lambda x, y: torch.baddbmm(x, y, torch.ones(2, WIDTH, WIDTH)),
        lambda x, y: x + 1,
        lambda x, y: x + y[:, :1],
        lambda x, y: x + y[0, 0],
        lambda x, y: x + y.sum(),
        lambda x, y: x.clone() + y,
        lambda x, y: x.contiguous().to(torch.float64) + y,
        lambda x, y: x.reshape(10, WIDTH) + y.view(10, WIDTH),
        lambda x, y: x[:, ::2] + y[:, ::2],
        lambda x, y: x[:, 0] + y[:, 0],
        lambda x, y: x.unsqueeze(1) + y.unsqueeze(1),
        lambda x, y: x.transpose(0, 1) + y.transpose(0, 1),
        lambda x, y: x * 0.5 + y,
        lambda x, y: x / 3 + y,
        lambda x, y: -x + y,
        lambda x, y: x * y.mean() + y,
        lambda x, y: F.dropout(x, 0.5, False) + y,
    ],
)
def test_one_push(graph: Callable[..., fx.GraphModule], function: Function) -> None:
    chain = walked(graph, function)
    assert pushed(chain) == [1]
    assert {position: [node.op for node in nodes] for position, nodes in chain.readers.items()} == {1: ["output"]}


@either
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x.tanh() + y,
        lambda x, y: x * y + y,
        lambda x, y: x @ y.transpose(1, 2) @ y,
        lambda x, y: x.mean(1, keepdim=True) + y,
        lambda x, y: x - x.mean(-1, keepdim=True),
        lambda x, y: x + y.sum(-1, keepdim=True),
        lambda x, y: torch.cat([x, y], 1),
        lambda x, y: x[..., :3],
        lambda x, y: x.flatten(1),
        lambda x, y: x.view(2, 5, 2, 4),
        lambda x, y: torch.add(x, y[:, :1, None]),
        lambda x, y: torch.addcmul(y, x, y),
        lambda x, y: torch.where(y > 0, x, y),
        lambda x, y: x.float().softmax(-1),
    ],
)
def test_reads_and_no_push(graph: Callable[..., fx.GraphModule], function: Function) -> None:
    chain = walked(graph, function)
    assert pushed(chain) == []
    assert list(chain.readers) == [0]


@either
def test_adding_zero_is_no_push(graph: Callable[..., fx.GraphModule]) -> None:
    chain = walked(graph, lambda x, y: sum([x, y]))
    assert pushed(chain) == [1]


@either
def test_metadata_is_no_read(graph: Callable[..., fx.GraphModule]) -> None:
    chain = walked(graph, lambda x, y: y.reshape(x.shape[0], -1, x.size(2)) * x.dim())
    assert pushed(chain) == []
    assert not chain.readers


@either
def test_branch_that_is_an_older_state(graph: Callable[..., fx.GraphModule]) -> None:
    """The latest state goes on; the older one is read."""
    chain = walked(graph, lambda x, y: (x + y) + x * 0.5)
    assert pushed(chain) == [1, 2]
    assert list(chain.readers) == [0, 2]
    other = walked(graph, lambda x, y: x + (x + y))
    assert pushed(other) == [1, 2]
    assert list(other.readers) == [0, 2]


@either
def test_axis_is_followed(graph: Callable[..., fx.GraphModule]) -> None:
    features_first = walked(graph, lambda x, y: x.transpose(1, 2) + y.transpose(1, 2), axis=-1)
    assert pushed(features_first) == [1]
    # a term that has the features in the other place is constant along them
    assert pushed(walked(graph, lambda x, y: x.transpose(1, 2) + y[0, 0, 0], axis=-1)) == [1]
    assert pushed(walked(graph, lambda x, y: x.transpose(1, 2) + y[0, :, 0], axis=-1)) == []
    assert pushed(walked(graph, lambda x, y: x.transpose(1, 2) + y[0, 0][:, None], axis=-1)) == [1]


@either
def test_two_chains_read_each_other(graph: Callable[..., fx.GraphModule]) -> None:
    module = graph(Calls(lambda x, y: x + y), example(2, 5, WIDTH), example(2, 5, WIDTH))
    sources = {placeholder(module, name): Source(-1, None) for name in "xy"}
    chains = follow(module, sources, NONE)
    assert [pushed(chain) for chain in chains] == [[], []]
    assert [[node.name for node in chain.readers[0]] for chain in chains] == [["add"], ["add"]]


@either
def test_pushes_know_the_one_before(graph: Callable[..., fx.GraphModule]) -> None:
    module = graph(Net())
    source = next(node for node in module.graph.nodes if node.name in ("linear", "embed"))
    (chain,) = follow(module, {source: Source(-1, None)}, NONE)
    assert [push.previous for push in chain.pushes] == [None, *chain.pushes[:-1]]
    assert chain.main_path({chain.pushes[1].node}) == {push.node for push in chain.pushes[:2]}


@either
def test_boundaries(graph: Callable[..., fx.GraphModule]) -> None:
    module = graph(Net(models.Block(), models.HandWrittenNorm()))
    source = next(node for node in module.graph.nodes if node.name in ("linear", "embed"))
    (free,) = follow(module, {source: Source(-1, None)}, NONE)
    essential = [{push.node for push in free.pushes}]
    for outermost, last in ((True, "layers.0.f"), (False, "layers.0.f.norm")):
        boundaries = Boundaries.around([free], essential, outermost=outermost)
        (chain,) = follow(module, {source: Source(-1, None)}, boundaries)
        keys = [key.removeprefix("L__self__") for key in chain.boundaries.values()]
        assert keys[0] == last
        # both operations of the hand-written norm lie behind one boundary
        assert keys.count("layers.1.norm") == 2
        assert pushed(chain) == [1, 2, 3]


@either
def test_exit_of_the_container(graph: Callable[..., fx.GraphModule]) -> None:
    """What leaves the module that holds the chain is read there, however many use it outside."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(models.Block(), models.Block())

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x.sin())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()

        def forward(self, x: Tensor) -> Tensor:
            y = self.encoder(x)
            return y + y.tanh() + 1

    module = graph(Model(), example(2, 5, WIDTH))
    source = next(node for node in module.graph.nodes if node.name == "sin")
    (free,) = follow(module, {source: Source(-1, None)}, NONE)
    assert pushed(free) == [1, 2, 3, 4, 5, 6]
    (kept,) = follow(module, {source: Source(-1, None)}, Boundaries.exits([free]))
    assert kept.container == ""
    inside = [push for push in free.pushes if push.owner]
    free.pushes = inside
    (kept,) = follow(module, {source: Source(-1, None)}, Boundaries.exits([free]))
    assert pushed(kept) == [1, 2, 3, 4]
    assert kept.container == "encoder.layers"
    assert {kept.boundaries[node] for node in kept.readers[4]} == {EXIT}


@either
def test_streams_cross_boundaries_one_by_one(graph: Callable[..., fx.GraphModule]) -> None:
    """To a sum behind the first stream's boundary the first is a tensor, and the second goes on."""

    class Reader(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.sin()
            return x + y + y.cos()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reader = Reader()

        def forward(self, x: Tensor) -> Tensor:
            return self.reader(x)

    module = graph(Model(), example(2, 5, WIDTH))
    node = {node.name: node for node in module.graph.nodes}
    key = next(call.key for call in _nodes.calls(node["sin"]) if call.path == "reader")
    sources = {node["x"]: Source(-1, None), node["sin"]: Source(-1, None)}
    first, second = follow(module, sources, Boundaries({node["x"]: frozenset({key})}, {}))
    assert (pushed(first), pushed(second)) == ([], [1, 2])
    assert first.boundaries == {node["sin"]: key, node["add"]: key}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, y: x.clone(), True),
        (lambda x, y: x.contiguous(), True),
        (lambda x, y: F.dropout(x, 0.5, False), True),
        (lambda x, y: F.dropout(x, 0.5, True), False),
        (lambda x, y: F.dropout(x, 0.0, True), True),
        (lambda x, y: torch.feature_dropout(x, 0.5, True), False),
        pytest.param(
            lambda x, y: torch.feature_dropout(x, 0.5, False),
            True,
        ),
        (lambda x, y: x.float(), True),
        (lambda x, y: x.double(), False),
        (lambda x, y: x.tanh(), False),
        (lambda x, y: x + y, False),
    ],
)
def test_changes_nothing(function: Function, expected: bool) -> None:
    module = traced(Calls(function), example(2, 5, WIDTH), example(2, 5, WIDTH))
    node = next(node for node in module.graph.nodes if node.op not in ("placeholder", "output"))
    assert changes_nothing(node, module) == expected
