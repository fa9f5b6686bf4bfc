"""Which sums are residual: one term is computed from another through a weight."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from attnres_compile.passes import residual_sums
from tests.passes import models
from tests.passes.models import WIDTH, Net
from tests.passes.tracing import example, exported, traced


class Terms(nn.Module):
    """A function of a stream `[2, 5, 8]` and a weight."""

    def __init__(self, function: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def found(function: Callable[[Tensor, nn.Module], Tensor]) -> list[tuple[str, str]]:
    """`(add, root)` of each residual sum."""
    module = traced(Terms(function), example(2, 5, WIDTH))
    return [(add.node.name, add.root.name) for add in residual_sums.find(module).residual]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x + w(x),
        lambda x, w: w(x) + x,
        lambda x, w: torch.add(x, w(x.tanh())),
        lambda x, w: x - w(x),
        lambda x, w: torch.addcmul(x, w(x), x.sigmoid()),
        lambda x, w: x + w(x).view(10, WIDTH).view(2, 5, WIDTH),
        lambda x, w: x + w(x) @ w(x).transpose(1, 2) @ x,
        lambda x, w: x * 2 + w(x),
        lambda x, w: x / torch.tensor(2.0) + w(x),
        pytest.param(
            lambda x, w: 2 * x + w(x),
        ),
    ],
)
def test_residual(function: Callable[[Tensor, nn.Module], Tensor]) -> None:
    (pair,) = found(function)
    assert pair[1] == "x"


@pytest.mark.parametrize(
    "function",
    [
        # no weight between the terms
        lambda x, w: x + x.tanh(),
        lambda x, w: w(x + x.sigmoid()),
        # two branches of one stream
        lambda x, w: w(x) + w(x.tanh()),
        lambda x, w: w(x) + 1,
        # a product of all features is no operand of the stream's shape
        lambda x, w: x[:, :1] + w(x),
        # one number a sample
        lambda x, w: x.sum((1, 2)) + w(x).sum((1, 2)),
        # integers
        lambda x, w: x.argmax(-1) + w(x).argmax(-1),
    ],
)
def test_not_residual(function: Callable[[Tensor, nn.Module], Tensor]) -> None:
    assert found(function) == []


def test_looks_through_what_a_stream_carries() -> None:
    def function(x: Tensor, w: nn.Module) -> Tensor:
        start = x.sin()
        kept = start.contiguous().to(torch.float32).view(10, WIDTH)
        return kept.view(2, 5, WIDTH) * 0.5 + w(start)

    module = traced(Terms(function), example(2, 5, WIDTH))
    (add,) = residual_sums.find(module).residual
    names = [node.name for node in add.path]
    assert names[0] == "mul"
    assert add.root.name == names[-1] == "sin"
    assert len(names) == 6


def test_first_zero_of_a_python_sum() -> None:
    # sum() starts with 0 + x, which is x; only the second add is one
    def added(x: Tensor, w: nn.Module) -> Tensor:
        total = sum([x, w(x)])
        assert not isinstance(total, int)
        return total

    assert found(added) == [("add_1", "x")]


def test_a_later_state_is_the_skip() -> None:
    """The source is re-injected: the latest state goes on, whichever side it is on."""

    def function(x: Tensor, w: nn.Module) -> Tensor:
        first = x + w(x)
        second = first + w(first)
        return w(second + x)

    assert found(function) == [("add", "x"), ("add_1", "add"), ("add_2", "add_1")]


def test_parallel_branches_continue_the_sum() -> None:
    names = [("add", "embed"), ("add_1", "add"), ("add_2", "add_1"), ("add_3", "add_2")]
    module = traced(Net(models.StreamFirst(), models.StreamFirst()))
    assert [(add.node.name, add.root.name) for add in residual_sums.find(module).residual] == names


def test_branches_summed_first() -> None:
    module = traced(Net(models.StreamLast(), models.StreamLast()))
    # add and add_2 are sums of branches
    expected = [("add_1", "embed"), ("add_3", "add_1")]
    assert [(add.node.name, add.root.name) for add in residual_sums.find(module).residual] == expected


@pytest.mark.parametrize("graph", [lambda m: exported(m).module, traced], ids=["export", "symbolic"])
def test_depth_counts_the_adds_that_follow(graph: Callable[[nn.Module], fx.GraphModule]) -> None:
    sums = residual_sums.find(graph(Net()))
    first, *_, last = sums.residual
    assert sums.depth[first.root] == len(sums.residual) == 4
    assert sums.depth[last.root] == 1
    assert last.node not in sums.depth


def test_graph_order() -> None:
    module = exported(models.TwoStreams()).module
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    places = [order[add.node] for add in residual_sums.find(module).residual]
    assert len(places) == 8
    assert places == sorted(places)
