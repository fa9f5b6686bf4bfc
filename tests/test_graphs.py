"""Exported programs and graph modules: rewritten with their own signature, and equal to Block AttnRes by hand."""

import copy
import io
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

import attnres_compile as ac
from attnres_compile.errors import InputError, OptionError, RefusedError, VerificationError
from attnres_compile.ops import reference
from tests.block_attnres import (
    Attention,
    HandWrittenBlockAttnRes,
    ParallelTransformer,
    PlainTransformer,
    randomise,
)
from tests.passes import models
from tests.passes.models import WIDTH
from tests.passes.tracing import example
from tests.tolerances import assert_close

TOKENS = (torch.arange(14).reshape(2, 7) * 5) % 31
EPS = 1e-3
MODELS: dict[str, type[PlainTransformer]] = {"sequential": PlainTransformer, "parallel": ParallelTransformer}


@cache
def transformer(name: str) -> PlainTransformer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name](layers=3 if name == "sequential" else 6).double().eval()


@cache
def program(name: str) -> ExportedProgram:
    return torch.export.export(transformer(name), (TOKENS,))


class LeafAttention(fx.Tracer):
    """Attention is called as a module: it unpacks shapes."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Attention) or super().is_leaf_module(m, module_qualified_name)


def symbolic(name: str) -> fx.GraphModule:
    model = transformer(name)
    return fx.GraphModule(model, LeafAttention().trace(model))


def by_hand(name: str, blocks: list[int], preserve: bool = True) -> HandWrittenBlockAttnRes:
    hand = HandWrittenBlockAttnRes(transformer(name), blocks, preserve=preserve, eps=EPS).double()
    randomise(hand)
    return hand


def load(module: nn.Module, hand: HandWrittenBlockAttnRes) -> None:
    with torch.no_grad():
        module.get_parameter("attnres.0.query").copy_(hand.query)
        module.get_parameter("attnres.0.key_norm").copy_(hand.key_norm)


def names(found: ExportedProgram) -> tuple[Any, ...]:
    return found.graph_signature.user_inputs, found.call_spec.in_spec, found.call_spec.out_spec


OPTIONS: list[tuple[dict[str, Any], list[int]]] = [
    ({"block_size": 1}, [1] * 6),
    ({"block_size": 2}, [2, 2, 2]),
    ({"block_size": 4}, [4, 2]),
    ({"num_blocks": 4}, [2, 2, 1, 1]),
    ({"num_blocks": 1}, [6]),
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("option", "blocks"), OPTIONS, ids=str)
def test_program_equals_block_attnres_by_hand(name: str, option: dict[str, Any], blocks: list[int]) -> None:
    result = ac.transform(program(name), verify="off", eps=EPS, **option)
    module, hand = result.module(), by_hand(name, blocks)
    assert_close(module(TOKENS), transformer(name)(TOKENS))
    load(module, hand)
    assert_close(module(TOKENS), hand(TOKENS))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("option", "blocks"), [OPTIONS[0], OPTIONS[2]], ids=str)
def test_symbolic_graph_equals_block_attnres_by_hand(name: str, option: dict[str, Any], blocks: list[int]) -> None:
    module, hand = ac.transform(symbolic(name), TOKENS, verify="off", eps=EPS, **option), by_hand(name, blocks)
    assert isinstance(module, fx.GraphModule)
    assert_close(module(TOKENS), transformer(name)(TOKENS))
    load(module, hand)
    assert_close(module(TOKENS), hand(TOKENS))


def test_weighted_mean() -> None:
    # The final norm's eps sees the mean, not the sum: a small one keeps the comparison about the reads.
    result = ac.transform(program("sequential"), verify="off", eps=EPS, block_size=2, preserve=False)
    hand = by_hand("sequential", [2, 2, 2], preserve=False)
    load(module := result.module(), hand)
    assert_close(module(TOKENS), hand(TOKENS))


def test_verified() -> None:
    result: Any = ac.transform(program("sequential"), block_size=2)
    assert result.attnres_report.chains[0].sublayers == 6
    checks = result.attnres_report.checks
    assert checks
    assert all(check.passed for check in checks)
    module: Any = ac.transform(symbolic("sequential"), TOKENS, block_size=2)
    assert len(module.attnres_report.checks) > len(checks)


def test_a_wrong_rewrite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnres_compile import graphs

    rewrite = graphs.rewrite_program

    def broken(*arguments: Any) -> ExportedProgram:
        result = rewrite(*arguments)
        for node in result.graph.nodes:
            if "depth_attention" in str(node.target):
                node.args = (*node.args[:4], 0.5 * node.args[4])
        result.graph_module.recompile()
        return result

    monkeypatch.setattr(graphs, "rewrite_program", broken)
    with pytest.raises(VerificationError, match="zero queries equal the original"):
        ac.transform(program("sequential"), block_size=2)


def test_signature_and_state() -> None:
    original = program("sequential")
    result = ac.transform(original, verify="off", block_size=2)
    assert names(result) == names(original)
    assert len(result.graph_signature.user_outputs) == len(original.graph_signature.user_outputs) == 1
    gained = {name: tuple(value.shape) for name, value in result.state_dict.items() if name not in original.state_dict}
    assert gained == {"attnres.0.query": (6, 24), "attnres.0.key_norm": (6, 24)}
    for name, value in original.state_dict.items():
        assert result.state_dict[name] is value
    assert result.graph_signature.parameters[:2] == ("attnres.0.query", "attnres.0.key_norm")
    assert result.module().state_dict().keys() == result.state_dict.keys()
    result.validate()
    plain = ac.transform(original, verify="off", key_norm=False)
    assert plain.state_dict.keys() - original.state_dict.keys() == {"attnres.0.query"}


def test_an_input_is_called_like_a_builtin() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformer("sequential")

        def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
            return self.model(input), input

    original = torch.export.export(Named(), (TOKENS,))
    result = ac.transform(original, num_blocks=2)
    assert result.graph_signature.user_inputs == ("input",)
    assert result.graph_signature.user_outputs[1] == "input"
    hidden, tokens = result.module()(TOKENS)
    assert torch.equal(tokens, TOKENS)
    assert_close(hidden, original.module()(TOKENS)[0])


def test_original_is_left_alone() -> None:
    original = torch.export.export(transformer("sequential"), (TOKENS,))
    text, keys = str(original.graph), list(original.state_dict)
    specs = copy.deepcopy(original.graph_signature)
    result = ac.transform(original, block_size=2)
    assert result is not original
    assert (str(original.graph), list(original.state_dict)) == (text, keys)
    assert original.graph_signature == specs
    assert torch.equal(original.module()(TOKENS), program("sequential").module()(TOKENS))
    module = symbolic("sequential")
    text, keys = str(module.graph), list(module.state_dict())
    assert ac.transform(module, TOKENS, verify="off") is not module
    assert (str(module.graph), list(module.state_dict())) == (text, keys)


def test_parameters_are_shared_with_the_original() -> None:
    module = symbolic("sequential")
    result = ac.transform(module, TOKENS, verify="off")
    assert result.get_parameter("head.weight") is module.get_parameter("head.weight")


def test_twice_is_an_error() -> None:
    once = ac.transform(program("sequential"), verify="off", block_size=2)
    with pytest.raises(RefusedError, match="has depth attention already"):
        ac.transform(once)
    module = ac.transform(symbolic("sequential"), TOKENS, verify="off", block_size=2)
    with pytest.raises(RefusedError, match="has depth attention already"):
        ac.transform(module, TOKENS)


def test_saved_and_loaded() -> None:
    result = ac.transform(program("sequential"), verify="off", eps=EPS, block_size=2)
    hand = by_hand("sequential", [2, 2, 2])
    with torch.no_grad():
        result.state_dict["attnres.0.query"].copy_(hand.query)
        result.state_dict["attnres.0.key_norm"].copy_(hand.key_norm)
    buffer = io.BytesIO()
    torch.export.save(result, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer)
    assert loaded.state_dict.keys() == result.state_dict.keys()
    assert_close(loaded.module()(TOKENS), hand(TOKENS))


def test_gradients() -> None:
    module, hand = (
        ac.transform(program("sequential"), verify="off", eps=EPS, block_size=2).module(),
        by_hand("sequential", [2, 2, 2]),
    )
    load(module, hand)
    ours, theirs = dict(module.named_parameters()), dict(hand.named_parameters())
    expected_names = [name.replace("attnres.0.", "").replace("model.", "") for name in ours]
    actual = torch.autograd.grad(module(TOKENS).square().sum(), list(ours.values()))
    plain = {name.removeprefix("model."): parameter for name, parameter in theirs.items()}
    expected = torch.autograd.grad(hand(TOKENS).square().sum(), [plain[name] for name in expected_names])
    for name, a, e in zip(ours, actual, expected, strict=True):
        assert_close(a, e, name)


def test_dynamic_shapes() -> None:
    model = transformer("sequential")
    shapes = {"tokens": {0: Dim("batch", min=2, max=8), 1: Dim("length", min=2, max=16)}}
    original = torch.export.export(model, (TOKENS,), dynamic_shapes=shapes)
    result = ac.transform(original, verify="off", eps=EPS, block_size=2)
    assert result.range_constraints == original.range_constraints
    hand = by_hand("sequential", [2, 2, 2])
    load(module := result.module(), hand)
    for batch, length in ((2, 7), (3, 11), (5, 2)):
        tokens = torch.arange(batch * length).reshape(batch, length) % 31
        assert_close(module(tokens), hand(tokens))


def exported(model: nn.Module, x: Tensor) -> ExportedProgram:
    return torch.export.export(model.double().eval(), (x.double(),))


def test_in_place_adds_are_functionalised() -> None:
    model: Any = models.Net(models.InPlace(), models.InPlace())
    original = exported(model, example())
    assert any("add_" in str(node.target) for node in original.graph.nodes)
    result = ac.transform(original, block_size=2, eps=EPS)
    assert not [node for node in result.graph.nodes if str(node.target).endswith(("add_.Tensor", "add_.default"))]
    module = result.module()
    torch.nn.init.normal_(query := module.get_parameter("attnres.0.query"))
    sublayers = [branch for layer in model.layers for branch in (layer.f, layer.g)]
    x = example().double()
    key_norm = module.get_parameter("attnres.0.key_norm")
    final = reference.block_attnres(model.embed(x), sublayers, query, key_norm, [2, 2], eps=EPS, preserve=True)
    assert_close(module(x), model.norm(final))


class Row(models.Pair):
    """A row of the state is changed in place, and the state is used afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        x[:, 0].add_(1.0)
        return x + self.g(x)


def test_changes_of_a_view_are_functionalised() -> None:
    model = models.Net(models.Block(), Row(), models.Block())
    original = exported(model, example())
    result = ac.transform(original, block_size=1)
    assert [chain.adds for chain in result.attnres_report.chains] == [4, 3]  # type: ignore[attr-defined]
    assert_close(result.module()(example().double()), model(example().double()))
    with pytest.raises(RefusedError, match=r"changed in place \(by an in-place `add_` at .*test_graphs\.py:\d+\)"):
        ac.transform(model, example().double(), block_size=1)


def test_chain_inside_one_function() -> None:
    """What a live module cannot do: the source crosses no module boundary."""
    model, x = models.OneFunction(), example(2, 5, WIDTH)
    with pytest.raises(RefusedError, match="no module boundary"):
        ac.transform(model, x)
    result = ac.transform(exported(model, x), block_size=1)
    assert "attnres.0.query" in result.state_dict
    assert_close(result.module()(x.double()), model(x.double()))


def test_several_chains() -> None:
    result: Any = ac.transform(exported(models.TwoStreams(), example()), block_size=2)
    gained = {name: tuple(value.shape) for name, value in result.state_dict.items() if name.startswith("attnres")}
    expected = {f"attnres.{i}.{name}": (4, WIDTH) for i in (0, 1) for name in ("query", "key_norm")}
    assert gained == expected
    module = result.module()
    module(example().double()).sum().backward()
    assert all(module.get_parameter(name).grad is not None for name in expected)
    second: Any = ac.transform(exported(models.TwoStreams(), example()), chains=[1])
    assert [chain.rewritten for chain in second.attnres_report.chains] == [False, True]
    assert [name for name in second.state_dict if "query" in name] == ["attnres.0.query"]


class Injected(models.Net):
    """The embedding comes in again with a learned weight, and the stream is scaled by a learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.tensor([1.1, 0.9]))

    def middle(self, x: Tensor) -> Tensor:
        first = x
        for i, layer in enumerate(self.layers):
            x = layer(self.scales[i] * x + 0.1 * first)
        return x


class Modulated(models.Net):
    """Branches read a modulated stream, without a norm: a product with a tensor reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(WIDTH, WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, models.Pair)
            x = x + layer.f(x * self.scale(x.mean(1, keepdim=True)))
            x = layer.g(x) + x
        return x


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Injected),
        pytest.param(Modulated),
        models.ChannelsFirst,
        models.Shared,
    ],
)
def test_odd_programs_keep_their_values(make: Callable[[], nn.Module]) -> None:
    model = make()
    result = ac.transform(exported(model, example()), block_size=2)
    assert_close(result.module()(example().double()), model(example().double()))
    assert any("attnres_compile" in str(node.target) for node in result.graph.nodes)


def test_regions_without_gradient_stay_without() -> None:
    class Frozen(models.Pair):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.f(x)
            with torch.no_grad():
                y = self.g(x)
            return x + y

    model = models.Net(Frozen(), Frozen())
    result = ac.transform(exported(model, example()), block_size=2).module()
    frozen = [name for name, _ in model.named_parameters() if ".g." in name]
    assert frozen
    for module in (model, result):
        parameters = [module.get_parameter(name) for name in frozen]
        loss = module(example().double()).square().sum()
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        assert [name for name, gradient in zip(frozen, found, strict=True) if gradient is not None] == []


def test_no_chain() -> None:
    original = exported(models.Net(models.PostNorm(), models.PostNorm()), example())
    with pytest.raises(RefusedError, match=r"post-norm[\s\S]*return self.norm\(x \+ self.linear\(x\)\)"):
        ac.transform(original)
    result: Any = ac.transform(original, strict=False)
    assert id(result) == id(original)
    assert not result.attnres_report.chains
    assert len(result.attnres_report.refused) == 2


def test_more_blocks_than_sublayers() -> None:
    with pytest.raises(OptionError, match="num_blocks=7"):
        ac.transform(program("sequential"), num_blocks=7)


def test_dry_run() -> None:
    report = ac.inspect(program("sequential"), block_size=2)
    transformed: Any = ac.transform(program("sequential"), block_size=2, verify="off")
    assert report == transformed.attnres_report
    assert (report.model, report.front_end) == ("ExportedProgram", "torch.export")
    graph = ac.inspect(symbolic("sequential"), TOKENS, block_size=2)
    assert graph.front_end == "fx graph"
    assert graph.chains[0].blocks == (2, 2, 2)


def test_graph_without_shapes_needs_inputs() -> None:
    with pytest.raises(InputError, match="pass example_inputs"):
        ac.transform(symbolic("sequential"))


def test_graph_module_of_a_program() -> None:
    module = program("sequential").module()
    assert isinstance(module, fx.GraphModule)
    result = ac.transform(module, TOKENS, eps=EPS, block_size=2, verify="off")
    hand = by_hand("sequential", [2, 2, 2])
    load(result, hand)
    assert_close(result(TOKENS), hand(TOKENS))
