"""Rewritten graphs: their text, their counts, their numbers against the reference, and the marks on new nodes."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from attnres_compile.capture.trace import Captured
from attnres_compile.chains import ResidualChain
from attnres_compile.errors import RefusedError
from attnres_compile.ops import reference
from attnres_compile.passes._emit import STAMP
from attnres_compile.passes.base import Subject, run
from attnres_compile.passes.pipelines import GRAPH
from attnres_compile.passes.rewrite_chains import Parameters, RewriteChains
from tests.passes import models
from tests.passes.models import WIDTH, Block, Net
from tests.passes.tracing import example, exported, listing, operations, subject, traced
from tests.tolerances import assert_close

EPS = 1e-3
KEPT = ("stack_trace", "nn_module_stack")
Sublayer = Callable[[Tensor], Tensor]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


def parameters(module: fx.GraphModule, chain: ResidualChain) -> Parameters:
    """Random queries and key norms as attributes of the graph module."""
    assert chain.plan is not None
    generator = torch.Generator().manual_seed(chain.plan.chain)
    shape, value = (chain.plan.reads, chain.width), chain.source.meta["val"]
    tensors = torch.randn(shape, generator=generator), 1 + torch.randn(shape, generator=generator) / 4
    made = []
    with module.graph.inserting_before(next(node for node in module.graph.nodes if node.op != "placeholder")):
        for name, tensor in zip(("query", "key_norm"), tensors, strict=True):
            attribute = f"{name}_{chain.plan.chain}"
            module.register_parameter(attribute, nn.Parameter(tensor.to(value.dtype)))
            node = module.graph.get_attr(attribute)
            parameter = module.get_parameter(attribute)
            node.meta["val"] = value.fake_mode.from_tensor(parameter, static_shapes=True)
            made.append(node)
    return made[0], made[1]


@cache
def captured(make: Callable[[], nn.Module], front_end: str) -> Captured:
    model, x = seeded(make), example().double()
    return exported(model, x) if front_end == "export" else Captured(traced(model, x), [x], "", None)


def planned(make: Callable[[], nn.Module], front_end: str, **options: Any) -> tuple[Subject, list[Any]]:
    """A copy of the graph with its chains planned, and its inputs."""
    found = captured(make, front_end)
    module = fx.GraphModule(found.module, copy.deepcopy(found.module.graph))
    return run(GRAPH, subject(module, eps=EPS, **options)), found.inputs


def rewritten(make: Callable[[], nn.Module], front_end: str, **options: Any) -> tuple[fx.GraphModule, list[Any]]:
    found, inputs = planned(make, front_end, **options)
    found.module.meta["plans"] = [chain.plan for chain in found.chains]
    run((RewriteChains(parameters),), found)
    return found.module, inputs


def result(module: fx.GraphModule, inputs: list[Any]) -> Tensor:
    output: Any = module(*inputs)
    return output[0] if isinstance(output, tuple) else output


def pair(layer: Any) -> list[Sublayer]:
    return [layer.f, layer.g]


def sequential(model: Any) -> list[Sublayer]:
    return [sublayer for layer in model.layers for sublayer in pair(layer)]


def parallel(model: Any) -> list[Sublayer]:
    return [lambda x, layer=layer: layer.f(x) + layer.g(x) for layer in model.layers]  # type: ignore[misc]


def channels_first(model: Any) -> list[Sublayer]:
    def convolved(layer: Any) -> Sublayer:
        return lambda x: layer.mix(layer.norm(x.transpose(1, 2))).transpose(1, 2)

    return [convolved(layer) for layer in model.layers]


def over_maps(model: Any) -> list[Sublayer]:
    def convolved(layer: Any) -> Sublayer:
        return lambda x: layer.mix(x.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)

    return [sublayer for layer in model.layers for sublayer in (convolved(layer), super(type(layer), layer).forward)]


def gated(model: Any) -> list[Sublayer]:
    return [
        sublayer
        for layer in model.layers
        for sublayer in (
            lambda x, w=layer: torch.sigmoid(w.weight[0, 0]) * w.linear(w.norm(x)),
            lambda x, w=layer: torch.bmm(w.norm(x), w.weight),
        )
    ]


def injected(model: Any) -> list[Sublayer]:
    """Nobody reads between the end of the first layer and the source's second coming: one sublayer pushes both."""
    first, second = model.layers
    x0 = model.embed(example().double())
    return [first.f, lambda x: first.g(x) + x0, second.f, second.g]


def plain_norms(model: Any) -> list[Sublayer]:
    return [lambda x, layer=layer: layer.linear(layer.norm(x)) for layer in model.layers]  # type: ignore[misc]


def net(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Net(*(layer() for layer in layers))


FIVE: Callable[[], nn.Module] = net(*[models.HandWrittenNorm] * 5)
ORACLES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], list[Sublayer]]]] = {
    "sequential": (net(Block, Block, Block), sequential),
    "x+a+m": (net(*[models.StreamFirst] * 4), parallel),
    "m+a+x": (net(*[models.StreamLast] * 4), parallel),
    "shared": (models.Shared, lambda model: pair(model.layers[0]) * 3),
    "x0": (models.Injected, injected),
    "channels": (models.ChannelsFirst, channels_first),
    "maps": (net(models.OverMaps, models.OverMaps), over_maps),
    "fused": (net(models.Gated, models.Gated), gated),
    "norms": (FIVE, plain_norms),
    "outer": (models.OuterAdds, lambda model: list(model.layers)),
}


CASES: list[Any] = [(name, "export", True) for name in ORACLES]
CASES += [(name, "symbolic", True) for name in ORACLES if name != "channels"]
CASES += [(name, "export", False) for name in ("sequential", "x+a+m", "channels", "shared")]
CASES += [pytest.param("channels", "symbolic", True)]


@pytest.mark.parametrize(("name", "front_end", "preserve"), CASES, ids=str)
def test_against_the_reference(name: str, front_end: str, preserve: bool) -> None:
    make, hand = ORACLES[name]
    model: Any = seeded(make)
    sublayers = hand(model)
    options = [{"block_size": n} for n in (1, 2, 3, 4) if n < len(sublayers)] + [{"num_blocks": 1}]
    for option in options:
        module, inputs = rewritten(make, front_end, preserve=preserve, **option)
        (plan,) = module.meta["plans"]
        source = model.embed(inputs[-1]) * (2 if name == "x0" else 1)
        query, key_norm = module.get_parameter("query_0"), module.get_parameter("key_norm_0")
        final = reference.block_attnres(
            source, sublayers, query, key_norm, plan.block_sizes, eps=EPS, preserve=preserve
        )
        assert_close(result(module, inputs), model.norm(final), f"{option}")


ZERO: list[Any] = [(models.TwoStreams, "export"), pytest.param(models.TwoStreams, "symbolic")]
ZERO += [(make, "export") for make, _ in ORACLES.values()]
ZERO += [(make, "symbolic") for name, (make, _) in ORACLES.items() if name != "channels"]
ZERO += [pytest.param(models.ChannelsFirst, "symbolic")]


@pytest.mark.parametrize(("make", "front_end"), ZERO)
def test_zero_queries_keep_the_sum(make: Callable[[], nn.Module], front_end: str) -> None:
    module, inputs = rewritten(make, front_end, block_size=2)
    random = result(module, inputs)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith("query_"):
                parameter.zero_()
    expected = result(captured(make, front_end).module, inputs)
    assert_close(result(module, inputs), expected)
    assert not torch.allclose(random, expected)


def test_listing() -> None:
    found, _ = planned(models.OuterAdds, "export", block_size=2)
    assert listing(found.module) == [
        "linear = linear(x)",
        "layer_norm = layer_norm(linear, [8], 1e-05)",
        "linear_1 = linear(layer_norm)",
        "add = add.Tensor(linear_1, linear)",
        "layer_norm_1 = layer_norm(add, [8], 1e-05)",
        "linear_2 = linear(layer_norm_1)",
        "add_1 = add.Tensor(linear_2, add)",
        "layer_norm_2 = layer_norm(add_1, [8], 1e-05)",
        "linear_3 = linear(layer_norm_2)",
        "add_2 = add.Tensor(linear_3, add_1)",
        "layer_norm_3 = layer_norm(add_2, [8], 1e-05)",
        "output = output([layer_norm_3])",
    ]
    run((RewriteChains(parameters),), found)
    assert [line for line in listing(found.module) if "getitem(" not in line and "unbind" not in line] == [
        "linear = linear(x)",
        "layer_norm = layer_norm(linear, [8], 1e-05)",
        "linear_1 = linear(layer_norm)",
        "select_int = select.int(0, 0)",
        "select_int_1 = select.int(0, 0)",
        "depth_attention_default = depth_attention([linear, linear_1], select_int, select_int_1, 0.001, 2.0)",
        "layer_norm_1 = layer_norm(depth_attention_default, [8], 1e-05)",
        "linear_2 = linear(layer_norm_1)",
        "add_tensor = add.Tensor(linear_1, linear_2)",
        "slice_tensor = slice.Tensor(0, 1, 3)",
        "slice_tensor_1 = slice.Tensor(0, 1, 3)",
        "inter_block_default = inter_block([linear, add_tensor], slice_tensor, slice_tensor_1, 0.001)",
        "merge_default = merge(getitem_3, getitem_5, getitem_7, 0.001, 2.0)",
        "layer_norm_2 = layer_norm(merge_default, [8], 1e-05)",
        "linear_3 = linear(layer_norm_2)",
        "select_int_2 = select.int(0, 2)",
        "select_int_3 = select.int(0, 2)",
        "merge_default_1 = merge(getitem_4, getitem_6, getitem_8, linear_3, select_int_2, select_int_3, 0.001, 3.0)",
        "layer_norm_3 = layer_norm(merge_default_1, [8], 1e-05)",
        "output = output([layer_norm_3])",
    ]


def counts(module: fx.GraphModule) -> dict[str, int]:
    names = [name.removesuffix(".default") for name in operations(module)]
    return {op: names.count(f"attnres_compile.{op}") for op in ("depth_attention", "inter_block", "merge")}


@pytest.mark.parametrize("front_end", ["export", "symbolic"])
@pytest.mark.parametrize(
    ("option", "expected"),
    [
        # six reads; the first block has one finished block, and a block with one read has nothing to share
        ({"num_blocks": 1}, {"depth_attention": 6, "inter_block": 0, "merge": 0}),
        ({"block_size": 2}, {"depth_attention": 1, "inter_block": 2, "merge": 5}),
        ({"block_size": 4}, {"depth_attention": 3, "inter_block": 1, "merge": 3}),
        # blocks of one: the last holds the final read as well
        ({"block_size": 1}, {"depth_attention": 4, "inter_block": 1, "merge": 2}),
        ({"num_blocks": 4}, {"depth_attention": 2, "inter_block": 2, "merge": 4}),
    ],
    ids=str,
)
def test_counts(front_end: str, option: dict[str, int], expected: dict[str, int]) -> None:
    module, _ = rewritten(ORACLES["sequential"][0], front_end, **option)
    assert counts(module) == expected
    # no add of the stream is left: one per push after the first of a block
    (plan,) = module.meta["plans"]
    assert sum("add" in name for name in operations(module)) == sum(size - 1 for size in plan.block_sizes)


@pytest.mark.parametrize("front_end", ["export", "symbolic"])
def test_a_norm_of_several_operations_reads_once(front_end: str) -> None:
    module, _ = rewritten(FIVE, front_end, num_blocks=1)
    assert counts(module)["depth_attention"] == 5


@pytest.mark.parametrize("front_end", ["export", "symbolic"])
@pytest.mark.parametrize("option", [{"block_size": 2}, {"num_blocks": 1}], ids=str)
def test_marks_on_new_nodes(front_end: str, option: dict[str, int]) -> None:
    for name in ("sequential", "fused"):
        found, _ = planned(ORACLES[name][0], front_end, **option)
        run((RewriteChains(parameters),), found)
        new = [node for node in found.module.graph.nodes if STAMP in node.meta]
        assert new
        for node in new:
            assert node.meta[STAMP] == "rewrite_chains"
            assert node.users
            assert "models.py" in node.meta["stack_trace"]
            assert node.meta["nn_module_stack"]
        for node in new:
            if str(node.target).startswith("attnres_compile.depth_attention"):
                value, (reader,) = node.meta["val"], node.users
                assert (tuple(value.shape), value.dtype) == ((2, 5, WIDTH), torch.float64)
                # where the reader is, the read is
                assert [node.meta[key] for key in KEPT] == [reader.meta[key] for key in KEPT]
        assert all(STAMP in node.meta for node in found.module.graph.nodes if "attnres_compile" in str(node.target))


@pytest.mark.parametrize("front_end", ["export", pytest.param("symbolic")])
def test_values_in_meta_are_those_at_run_time(front_end: str) -> None:
    module, inputs = rewritten(ORACLES["channels"][0], front_end, block_size=1)

    class Compared(fx.Interpreter):
        seen = 0

        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if STAMP in n.meta and isinstance(value, Tensor):
                self.seen += 1
                said = n.meta["val"]
                assert (said.shape, said.dtype, said.stride()) == (value.shape, value.dtype, value.stride()), n.name
            return value

    interpreter = Compared(module)
    interpreter.run(*inputs)
    assert interpreter.seen > 5


@pytest.mark.parametrize("front_end", ["export", "symbolic"])
def test_the_rest_of_the_graph_is_left_alone(front_end: str) -> None:
    found, _ = planned(net(Block, Block), front_end, block_size=2)
    pushes = {push.node.name for push in found.chains[0].pushes}
    before = {node.name: node for node in found.module.graph.nodes if node.name not in pushes}
    run((RewriteChains(parameters),), found)
    after = {node.name: node for node in found.module.graph.nodes if STAMP not in node.meta}
    assert after.keys() - before.keys() == {"query_0", "key_norm_0"}
    assert before.keys() <= after.keys()
    for name, node in before.items():
        assert (after[name].op, after[name].target, after[name].meta) == (node.op, node.target, node.meta)


@pytest.mark.parametrize("front_end", ["export", "symbolic"])
def test_second_run_changes_nothing(front_end: str) -> None:
    found, _ = planned(Net, front_end, block_size=2)
    assert RewriteChains(parameters)(found)
    found.module.graph.lint()
    assert found.chains == []
    text = str(found.module.graph)
    assert not RewriteChains(parameters)(found)
    assert str(found.module.graph) == text


def test_unplanned_chains_stay() -> None:
    found, _ = planned(models.TwoStreams, "export", chains=[1], block_size=1)
    run((RewriteChains(parameters),), found)
    assert [name for name, _ in found.module.named_parameters() if "query" in name] == ["query_0"]
    assert sum("add" in name for name in operations(found.module)) == 4
    unplanned, _ = planned(models.TwoStreams, "export", chains=[])
    text = str(unplanned.module.graph)
    assert not RewriteChains(parameters)(unplanned)
    assert str(unplanned.module.graph) == text


class Unbound(nn.Module):
    """The in-place add is for its effect alone: `x` means the new value, and in a symbolic graph the old node."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(self.linear(x.tanh()))
        return x + self.linear(x.sin())


def test_use_of_the_old_value_after_an_in_place_add_is_refused() -> None:
    found, _ = planned(net(Unbound, Unbound), "symbolic", block_size=1)
    assert found.chains
    with pytest.raises(RefusedError, match=r"changed in place.*test_rewrite_chains\.py:\d+: return x \+ self"):
        run((RewriteChains(parameters),), found)


class ChangedUnderAnotherName(nn.Module):
    """Something is changed in place, and what shares its memory is used afterwards."""

    def __init__(self, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.change, self.f, self.g = change, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        f = self.f(x.tanh())
        return x + self.g(self.change(x, f, x + f).sin())


def row_of_a_state(x: Tensor, f: Tensor, y: Tensor) -> Tensor:
    y[:, 0].add_(f[:, 0])
    return y


def first_half_of_a_state(x: Tensor, f: Tensor, y: Tensor) -> Tensor:
    torch.relu_(y[..., :2])
    return y


def kept_branch(x: Tensor, f: Tensor, y: Tensor) -> Tensor:
    f.mul_(2.0)
    return y


def tensor_to_which_a_state_is_added(x: Tensor, f: Tensor, y: Tensor) -> Tensor:
    z = f.cos()
    z.add_(y)
    return z


CHANGES = [row_of_a_state, first_half_of_a_state, kept_branch, tensor_to_which_a_state_is_added]


@pytest.mark.parametrize("change", CHANGES)
def test_memory_that_is_changed_in_place_is_used_under_no_other_name(change: Callable[..., Tensor]) -> None:
    found = run(GRAPH, subject(traced(net(lambda: ChangedUnderAnotherName(change), Block)(), example()), block_size=1))
    assert found.chains
    with pytest.raises(RefusedError, match=r"changed in place .*, changed at .*test_rewrite_chains\.py:\d+: \S+"):
        run((RewriteChains(parameters),), found)
