"""Where a stream starts: which module its source enters or leaves, and which axis holds the features."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from attnres_compile import transform
from attnres_compile.chains import Start
from attnres_compile.passes import residual_sums, starts
from attnres_compile.passes.detect_chains import detect
from tests.passes import models
from tests.passes.models import WIDTH, Block, Branch, Net
from tests.passes.tracing import example, exported, traced

either = pytest.mark.parametrize(
    "graph", [lambda model, *x: exported(model, *x).module, traced], ids=["export", "symbolic"]
)
Graph = Callable[..., fx.GraphModule]
SHAPE = (2, 5, WIDTH)


class Container(nn.Module):
    """Adds in the container's own loop, over a source that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for branch in self.branches:
            x = x + branch(x)
        return x


class Positions(Net):
    """Terms added to the embedding before the first layer belong to the source."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(5, WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(0.5 * x + self.place)


class LearnedToken(Net):
    """The source is a parameter, expanded over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        token = self.token.expand(len(x), -1, -1)
        for layer in self.layers:
            token = layer(token)
        return token + x


class Permuted(Net):
    """`[batch, length, features]` becomes `[length, features, batch]` before the layers, which undo it."""

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.embed(x).permute(1, 0, 2))


def start_of(module: fx.GraphModule) -> tuple[str, Start | None]:
    """The only chain's source and start."""
    (chain,), _ = detect(module)
    return chain.source.name, chain.start


@either
def test_argument_of_the_first_layer(graph: Graph) -> None:
    assert start_of(graph(Net()))[1] == Start("layers.0", "argument", SHAPE)


@either
def test_argument_of_the_container(graph: Graph) -> None:
    module = graph(Net(Container()))
    source, start = start_of(module)
    assert source in ("linear", "embed")
    assert start == Start("layers.0", "argument", SHAPE)


@either
def test_terms_before_the_layers_belong_to_the_source(graph: Graph) -> None:
    assert start_of(graph(Positions())) == ("add", Start("layers.0", "argument", SHAPE))


@either
def test_output_where_no_module_receives_the_stream(graph: Graph) -> None:
    assert start_of(graph(models.OuterAdds()))[1] == Start("embed", "output", SHAPE)


@either
def test_no_boundary(graph: Graph) -> None:
    assert start_of(graph(models.OneFunction(), example(*SHAPE))) == ("sin", None)


def test_expanded_parameter() -> None:
    assert start_of(exported(LearnedToken()).module) == ("expand", Start("layers.0", "argument", (2, 1, WIDTH)))


@either
def test_chain_within_a_layer(graph: Graph) -> None:
    """The projection before it is inside the layer: its output is the source."""

    class Projected(Block):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.project(x))

    (first, second), _ = detect(graph(Net(Projected(), nn.Tanh(), Projected())))
    assert first.start == Start("layers.0.project", "output", SHAPE)
    assert second.start == Start("layers.2.project", "output", SHAPE)
    assert (first.container, second.container) == ("layers.0", "layers.2")


class Pooled(Block):
    """A stage's first layer: its skip is a function of what the branch reads, and no ancestor of the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return super().forward(x.sigmoid() + self.mix(x))


@either
def test_sum_of_a_function_and_an_output(graph: Graph) -> None:
    """The source is made beside the first add: the term that a module made is the source."""
    model = Net(Pooled(), Block())
    chain = detect(graph(model))[0][-1]
    assert chain.start == Start("layers.0.mix", "output", SHAPE)
    assert len(chain.pushes) == 5
    report: Any = transform(model, example(), block_size=2).attnres_report
    assert [found.adds for found in report.chains] == [5]
    assert all(check.passed for check in report.checks)


def test_maps_and_tokens_are_one_stream() -> None:
    report: Any = transform(Net(models.OverMaps(), models.OverMaps()), example(), block_size=2).attnres_report
    assert [found.adds for found in report.chains] == [4]
    assert all(check.passed for check in report.checks)


@pytest.mark.parametrize(
    ("model", "axis"),
    [
        (lambda: Net(), -1),
        (models.ChannelsFirst, -2),
        (Permuted, -1),
        (lambda: Net(*(models.HandWrittenNorm() for _ in range(2))), -1),
    ],
)
@either
def test_feature_axis(graph: Graph, model: Callable[[], nn.Module], axis: int) -> None:
    (chain,), _ = detect(graph(model()))
    assert chain.axis == axis
    assert chain.width == WIDTH


@pytest.mark.parametrize(
    ("function", "axis"),
    [
        (lambda x, w, c: w(x.tanh()), -1),
        (lambda x, w, c: w(x.movedim(1, -1)), -3),
        (lambda x, w, c: w((x + 1.0).transpose(1, 3).contiguous()), -3),
        (lambda x, w, c: c(x), -3),
        (lambda x, w, c: c(x.permute(0, 3, 1, 2)), -1),
        (lambda x, w, c: x.exp(), -1),
        # windows of tokens
        (lambda x, w, c: w(F.pad(x.permute(0, 2, 3, 1), (0, 0, 0, 1)).roll(1, 2).reshape(2, 20, 4)), -3),
        # a reshape after which nothing is known of the last axis
        (lambda x, w, c: w(x.flatten(1, 2).unflatten(1, (4, 4)).transpose(1, 3)), -1),
    ],
)
def test_axis_of_what_mixes_features_first(function: Callable[..., Tensor], axis: int) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.mix = nn.Linear(4, 4), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return function(x, self.linear, self.mix)

    module = traced(Reader(), example(2, 4, 4, 4))
    source = next(node for node in module.graph.nodes if node.op == "placeholder")
    assert starts.feature_axis(source, module) == axis


@pytest.mark.parametrize(
    ("function", "axis"),
    [
        (lambda x, w, c: c(x), -3),
        (lambda x, w, c: c(x).permute(0, 2, 3, 1).contiguous(), -1),
        (lambda x, w, c: w(x), -1),
        (lambda x, w, c: w(x).transpose(1, 3) * 2.0, -3),
        (lambda x, w, c: c(x).exp(), -1),
    ],
)
def test_axis_of_what_made_the_source(function: Callable[..., Tensor], axis: int) -> None:
    """Where the branches take the features apart before they mix them."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.mix = nn.Linear(4, 4), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return torch.sin(function(x, self.linear, self.mix)).split(2, 1)

    module = traced(Reader(), example(2, 4, 4, 4))
    source = next(node for node in module.graph.nodes if node.target is torch.sin).all_input_nodes[0]
    assert starts.feature_axis(source, module) == axis


def test_sources_need_two_adds() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = Branch()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.branch(x)

    module = traced(Once(), example(*SHAPE))
    sums = residual_sums.find(module)
    assert len(sums.residual) == 1
    assert starts.sources(module, sums) == {}
    twice = traced(nn.Sequential(Once(), Once()), example(*SHAPE))
    assert [node.name for node in starts.sources(twice, residual_sums.find(twice))] == ["input_1"]
