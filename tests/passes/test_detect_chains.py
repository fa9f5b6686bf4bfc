"""Chains, their readers, and refusals, in graphs of both front ends."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, fx, nn

from attnres_compile.chains import Refusal, ResidualChain, Start
from attnres_compile.passes.detect_chains import DETACHED, GATED, NO_BOUNDARY, UNUSED, DetectChains
from tests.passes import models
from tests.passes.models import WIDTH, Net
from tests.passes.tracing import example, exported, listing, structure, subject, traced

FRONT_ENDS: dict[str, Callable[..., fx.GraphModule]] = {
    "export": lambda model, *inputs: exported(model, *inputs).module,
    "symbolic": traced,
}
either = pytest.mark.parametrize("graph", FRONT_ENDS.values(), ids=FRONT_ENDS.keys())


def detected(module: fx.GraphModule, **options: Any) -> tuple[list[ResidualChain], list[Refusal]]:
    found = subject(module)
    DetectChains(**options)(found)
    return found.chains, found.refusals


def only(module: fx.GraphModule) -> ResidualChain:
    (chain,), refusals = detected(module)
    assert not refusals
    return chain


def shape_of(chain: ResidualChain) -> tuple[list[int], dict[int, int]]:
    """Positions of the pushes, and the number of readers per position."""
    return [push.position for push in chain.pushes], {p: len(nodes) for p, nodes in sorted(chain.readers.items())}


def location(made: type[nn.Module], code: str) -> str:
    """`file:line: code` of a line in a test model."""
    lines, first = inspect.getsourcelines(made)
    (offset,) = (i for i, line in enumerate(lines) if line.strip() == code)
    return f"{inspect.getsourcefile(made)}:{first + offset}: {code}"


def test_names_in_an_exported_graph() -> None:
    module = FRONT_ENDS["export"](Net())
    text = listing(module)
    assert text[:7] == [
        "linear = linear(x)",
        "layer_norm = layer_norm(linear, [8], 1e-05)",
        "linear_1 = linear(layer_norm)",
        "add = add.Tensor(linear, linear_1)",
        "layer_norm_1 = layer_norm(add, [8], 1e-05)",
        "linear_2 = linear(layer_norm_1)",
        "add_1 = add.Tensor(add, linear_2)",
    ]
    chain = only(module)
    assert structure(chain) == {
        "source": "linear",
        "pushes": {"add": 1, "add_1": 2, "add_2": 3, "add_3": 4},
        "readers": {n: ["layer_norm" + f"_{n}" * (n > 0)] for n in range(5)},
    }
    assert (chain.axis, chain.width, chain.length, chain.sublayers) == (-1, WIDTH, 4, 4)
    assert listing(module) == text


def test_names_in_a_symbolic_graph() -> None:
    assert structure(only(traced(Net()))) == {
        "source": "embed",
        "pushes": {"add": 1, "add_1": 2, "add_2": 3, "add_3": 4},
        "readers": {
            0: ["layers_0_f_norm"],
            1: ["layers_0_g_norm"],
            2: ["layers_1_f_norm"],
            3: ["layers_1_g_norm"],
            4: ["norm"],
        },
    }


@either
def test_owners_boundaries_and_anchors(graph: Callable[..., fx.GraphModule]) -> None:
    chain = only(graph(Net()))
    assert chain.start == Start("layers.0", "argument", (2, 5, WIDTH))
    assert chain.container == ""
    assert chain.anchors == {"layers.0": (0,), "layers.1": (2,)}
    assert [(push.owner, push.owner_class) for push in chain.pushes] == [(f"layers.{i}", "Block") for i in (0, 0, 1, 1)]
    # the outermost module that only reads
    keys = [key.removeprefix("L__self__") for key in chain.boundaries.values()]
    assert keys == ["layers.0.f", "layers.0.g", "layers.1.f", "layers.1.g", "norm"]


@either
def test_innermost_boundaries(graph: Callable[..., fx.GraphModule]) -> None:
    (chain,), _ = detected(graph(Net()), outermost=False)
    keys = [key.removeprefix("L__self__") for key in chain.boundaries.values()]
    assert keys == ["layers.0.f.norm", "layers.0.g.norm", "layers.1.f.norm", "layers.1.g.norm", "norm"]


@either
@pytest.mark.parametrize(
    ("model", "pushes", "readers"),
    [
        # nobody reads between the two adds: two pushes, one sublayer
        (lambda: Net(models.StreamFirst(), models.StreamFirst()), 4, {0: 2, 2: 2, 4: 1}),
        # the branches meet before the stream: one push
        (lambda: Net(models.StreamLast(), models.StreamLast()), 2, {0: 2, 1: 2, 2: 1}),
        (lambda: Net(models.InPlace(), models.InPlace()), 4, {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}),
        # the norm is one module of two reading operations
        (lambda: Net(*(models.HandWrittenNorm() for _ in range(3))), 3, {0: 2, 1: 2, 2: 2, 3: 1}),
        # the subtracted mean is constant along the features: it reads and pushes nothing
        (lambda: Net(*(models.InlineNorm() for _ in range(3))), 3, {0: 2, 1: 2, 2: 2, 3: 1}),
        (models.Shared, 6, dict.fromkeys(range(7), 1)),
        # the source is the first sum, and x0 comes in once more, after state 2, which nobody reads
        (models.Injected, 5, {0: 1, 1: 1, 3: 1, 4: 1, 5: 1}),
        (models.ChannelsFirst, 3, {0: 1, 1: 1, 2: 1, 3: 1}),
        (models.OuterAdds, 3, {0: 1, 1: 1, 2: 1, 3: 1}),
        (lambda: Net(models.Gated(), models.Gated()), 4, {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}),
    ],
    ids=["x+a+m", "m+a+x", "in place", "norm module", "inline norm", "shared", "x0", "channels", "outer", "fused"],
)
def test_pushes_and_readers(
    graph: Callable[..., fx.GraphModule], model: Callable[[], nn.Module], pushes: int, readers: dict[int, int]
) -> None:
    chain = only(graph(model()))
    assert shape_of(chain) == (list(range(1, pushes + 1)), readers)
    assert chain.sublayers == len(readers) - 1


@either
def test_two_streams(graph: Callable[..., fx.GraphModule]) -> None:
    chains, refusals = detected(graph(models.TwoStreams()))
    assert not refusals
    assert [shape_of(chain) for chain in chains] == [
        ([1, 2, 3, 4], {0: 2, 1: 1, 2: 1, 3: 1, 4: 1}),
        ([1, 2, 3, 4], {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}),
    ]
    assert [chain.start.module for chain in chains if chain.start] == ["layers.0", "layers.2"]
    assert chains[1].source in chains[0].readers[0]
    # the product reads the final states of both
    assert chains[0].readers[4] == chains[1].readers[4]


@either
def test_shared_module_has_an_anchor_per_visit(graph: Callable[..., fx.GraphModule]) -> None:
    chain = only(graph(models.Shared()))
    assert chain.anchors == {"layers.0": (0, 2, 4)}
    assert len(set(chain.boundaries.values())) == 7


@either
def test_channels_first(graph: Callable[..., fx.GraphModule]) -> None:
    chain = only(graph(models.ChannelsFirst(), example(2, 5, 3)))
    assert (chain.axis, chain.width) == (-2, WIDTH)


@either
def test_source_is_an_output(graph: Callable[..., fx.GraphModule]) -> None:
    chain = only(graph(models.OuterAdds()))
    assert chain.start == Start("embed", "output", (2, 5, WIDTH))
    assert not chain.anchors


@either
@pytest.mark.parametrize(
    ("layer", "code", "reason"),
    [
        (models.PostNorm, "return self.norm(x + self.linear(x))", "post-norm"),
        (models.Activated, "return F.relu(x + self.linear(x))", "activation after the add"),
        (models.Squared, "return (x + self.linear(x)).square()", "ends after one sublayer; it is read next by square"),
        (models.NormedAndKept, "x = x + self.linear(x)", "it is read next by layer_norm, mul"),
    ],
)
def test_refusals(graph: Callable[..., fx.GraphModule], layer: type[nn.Module], code: str, reason: str) -> None:
    chains, refusals = detected(graph(Net(layer(), layer())))
    assert not chains
    assert [refusal.node for refusal in refusals] == ["add", "add_1"]
    for refusal in refusals:
        assert reason in refusal.reason
        assert refusal.where == location(layer, code)


@either
def test_one_sublayer_is_refused_beside_a_chain(graph: Callable[..., fx.GraphModule]) -> None:
    chains, refusals = detected(graph(Net(models.Block(), nn.LayerNorm(WIDTH), models.PostNorm())))
    assert [shape_of(chain) for chain in chains] == [([1, 2], {0: 1, 1: 1, 2: 1})]
    (refusal,) = refusals
    assert (refusal.node, refusal.where) == ("add_2", location(models.PostNorm, "return self.norm(x + self.linear(x))"))


@either
def test_gated_skips_in_a_row_are_refused_beside_a_chain(graph: Callable[..., fx.GraphModule]) -> None:
    layers = models.Block(), nn.LayerNorm(WIDTH), models.ScaledSkip(), models.ScaledSkip()
    chains, refusals = detected(graph(Net(*layers)))
    assert [shape_of(chain)[0] for chain in chains] == [[1, 2]]
    where = location(models.ScaledSkip, "return x * self.scale + super().forward(x)")
    assert [(refusal.reason, refusal.where) for refusal in refusals] == [(GATED, where)] * 2
    # One alone may be a part of a branch.
    assert detected(graph(Net(*layers[:3])))[1] == []


@either
def test_live_needs_a_module_boundary(graph: Callable[..., fx.GraphModule]) -> None:
    module = graph(models.OneFunction(), example(2, 5, WIDTH))
    chain = only(module)
    assert (chain.start, shape_of(chain)) == (None, ([1, 2, 3], {0: 1, 1: 1, 2: 1, 3: 1}))
    chains, refusals = detected(module, live=True)
    where = location(models.OneFunction, "x = x + F.layer_norm(x, (WIDTH,)) @ weight")
    assert not chains
    assert refusals == [Refusal(NO_BOUNDARY, "add", where)]


@either
def test_weighted_mean_needs_norms(graph: Callable[..., fx.GraphModule]) -> None:
    found = subject(graph(models.OneFunction(), example(2, 5, WIDTH)), preserve=False)
    DetectChains()(found)
    assert not found.chains
    (refusal,) = found.refusals
    assert "preserve=False" in refusal.reason
    assert "output" in refusal.reason
    normed = subject(graph(Net()), preserve=False)
    DetectChains()(normed)
    assert len(normed.chains) == 1
    assert not normed.refusals


@either
@pytest.mark.parametrize("model", [Net, models.TwoStreams, lambda: Net(models.PostNorm(), models.PostNorm())])
def test_second_run_changes_nothing(graph: Callable[..., fx.GraphModule], model: Callable[[], nn.Module]) -> None:
    found = subject(graph(model()))
    text = str(found.module.graph)
    DetectChains()(found)
    chains, refusals = list(found.chains), list(found.refusals)
    assert not DetectChains()(found)
    assert (found.chains, found.refusals) == (chains, refusals)
    assert str(found.module.graph) == text


def test_a_find_is_a_change() -> None:
    assert DetectChains()(subject(traced(Net())))


def test_a_graph_without_residual_adds_has_its_reason() -> None:
    found = subject(traced(nn.Sequential(nn.Linear(3, 3))))
    assert DetectChains()(found)
    (refusal,) = found.refusals
    assert "no residual add" in refusal.reason
    assert not DetectChains()(found)


def test_a_live_stream_that_gets_no_gradient_is_refused() -> None:
    class Detached(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    for live in (False, True):
        found = subject(traced(Detached()))
        DetectChains(live=live)(found)
        assert bool(found.chains) != live
        assert [refusal.reason for refusal in found.refusals] == [DETACHED] * live


def test_a_stream_that_nothing_depends_on_is_refused() -> None:
    class Unused(Net):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            return x

    found = subject(traced(Unused()))
    DetectChains()(found)
    assert not found.chains
    assert "reaches the output" in found.refusals[0].reason


@either
def test_a_start_that_is_called_with_something_else_is_refused(graph: Callable[..., fx.GraphModule]) -> None:
    class Twice(Net):
        def middle(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            y = self.norm(x)
            for layer in self.layers:
                y = layer(y)
            return y

    chains, refusals = detected(graph(Twice()), live=True)
    assert not chains
    assert all("called with another value" in refusal.reason for refusal in refusals)


def test_a_refusal_is_a_change() -> None:
    assert DetectChains()(subject(traced(Net(models.PostNorm(), models.PostNorm()))))


@either
@pytest.mark.parametrize("used", [False, True])
def test_a_change_in_place_counts_where_its_memory_is_used(graph: Callable[..., fx.GraphModule], used: bool) -> None:
    class Written(Net):
        def forward(self, x: Tensor) -> Tensor:
            into = x.cos()
            rows = into.view(-1, 3)
            rows.add_(super().forward(x)[..., :3].reshape(-1, 3))
            return into if used else x

    found = subject(graph(Written(), example()))
    DetectChains()(found)
    assert bool(found.chains) == used
    assert [refusal.reason for refusal in found.refusals] == [UNUSED] * (not used)
