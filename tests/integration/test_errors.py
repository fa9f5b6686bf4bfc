"""What cannot be done is refused with the reason, and what is left out stays as it was."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.capture import trace
from tests import own_models
from tests.integration.models import (
    QUERY,
    attnres_parameters,
    example,
    pair,
    projection,
    randomise,
    run,
    transformed,
)
from tests.integration.snapshot import snapshot
from tests.programs import PROGRAMS
from tests.programs.parts import Net
from tests.tolerances import assert_close, relative_error
from tests.zoo import CASES, WIDTH, noise, seeded

X = noise(2, 7, 5)


def nanogpt() -> nn.Module:
    return CASES["nanogpt"].build(layers=2)


class Random(Net):
    """No two calls are equal."""

    def finish(self, x: Tensor) -> Tensor:
        return super().finish(x) * random.random()


class Branching(Net):
    """The path depends on values, which only a run can follow."""

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if float(x.sum()) > 0 else layer(layer(x))
        return x


class Codes(Net):
    """The first stage hands on integers, through which no gradient goes."""

    def __init__(self) -> None:
        super().__init__(2)
        self.table = nn.Embedding(16, 16)
        self.second = Net(2)

    def middle(self, x: Tensor) -> Tensor:
        x = self.table(self.norm(super().middle(x)).argmax(-1))
        for layer in self.second.layers:
            x = layer(x)
        return x


class Plain(nn.Sequential):
    """Linear layers without a residual."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 5), nn.GELU(), nn.Linear(5, 5))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_blocks": 2, "block_size": 2}, ["num_blocks=2", "block_size=2", "one of them"]),
        ({"num_blocks": 0}, ["num_blocks", "0"]),
        ({"num_blocks": -1}, ["num_blocks", "-1"]),
        ({"num_blocks": 1.5}, ["num_blocks", "1.5"]),
        ({"block_size": 0}, ["block_size", "0"]),
        ({"num_blocks": 5}, ["num_blocks=5", "4 sublayers", "at most 4"]),
        ({"eps": 0.0}, ["eps", "positive"]),
        ({"verify": "fast"}, ["verify", "fast"]),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], words: list[str]) -> None:
    model = nanogpt()
    before = snapshot(model)
    with pytest.raises(ac.OptionError) as caught:
        ac.transform(model, example("nanogpt"), inplace=True, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert snapshot(model) == before
    assert isinstance(caught.value, ValueError)


def test_an_unknown_option() -> None:
    options: dict[str, Any] = {"num_block": 2}
    with pytest.raises(TypeError, match="num_block"):
        ac.transform(nanogpt(), example("nanogpt"), **options)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (None, ["NanoGPT", "example_inputs"]),
        ({"tokens": torch.ones(2, 7, dtype=torch.long)}, ["NanoGPT", "do not fit", "tokens"]),
        (torch.randn(2, 7), ["NanoGPT", "do not fit"]),
        ((), ["NanoGPT", "do not fit", "input_ids"]),
        (3, ["int", "tensor", "mapping"]),
        ("text", ["str", "tensor", "mapping"]),
    ],
    ids=["none", "wrong name", "wrong dtype", "no arguments", "number", "string"],
)
def test_example_inputs(inputs: Any, words: list[str]) -> None:
    model = nanogpt()
    before = snapshot(model)
    for call in (ac.transform, ac.inspect):
        with pytest.raises(ac.InputError) as caught:
            call(model, inputs)
        assert all(word in str(caught.value) for word in words), str(caught.value)
    assert snapshot(model) == before


class Outer(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: Tensor) -> Tensor:
        output: Tensor = self.inner(input_ids)
        return output


@pytest.mark.parametrize("wrap", [lambda model: model, Outer, copy.deepcopy], ids=["itself", "a part", "a copy"])
def test_transformed_already(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = transformed("nanogpt")
    before, expected = snapshot(model), run("nanogpt", model)
    for call in (ac.transform, ac.inspect):
        with pytest.raises(ac.RefusedError, match=r"already.*transform the original"):
            call(wrap(model), example("nanogpt"))
    assert snapshot(model) == before
    assert torch.equal(run("nanogpt", model), expected)


def test_verify_wants_a_transformed_model() -> None:
    with pytest.raises(ac.InputError, match="transform"):
        ac.verify(nanogpt(), nanogpt(), example("nanogpt"))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    "post-norm": (CASES["bert"].build, CASES["bert"].inputs(2, 7), ["no residual chain", "LayerNorm"]),
    "activation after the add": (CASES["resnet"].build, CASES["resnet"].inputs(2, 7), ["no residual chain", "relu"]),
    "no adds": (Plain, X, ["no residual chain", "Plain"]),
    "one bottleneck": (lambda: own_models.Bottleneck(8).eval(), noise(2, 8, 6, 6), ["no residual chain"]),
    "in place": (PROGRAMS["UnboundInPlace"].build, X, ["in place", "x = x + f(x)", "hostile.py"]),
    "alias": (PROGRAMS["AliasInPlace"].build, X, ["in place", "rebind"]),
    "reentrant": (PROGRAMS["ReentrantInTraining"].build, X, ["use_reentrant=False"]),
    "scripted": (PROGRAMS["Scripted"].build, X, ["ScriptModule"]),
    "random": (lambda: seeded(Random), X, ["verify='off'", "left as it was"]),
    "not selected": (lambda: seeded(Net), X, ["no residual chain", "not selected"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """In place, where an attempt could leave something behind."""
    build, inputs, words = REFUSED[name]
    model = build()
    options: dict[str, Any] = {"chains": [7]} if name == "not selected" else {}
    before = snapshot(model)
    with pytest.raises(ac.RefusedError) as caught:
        ac.transform(model, inputs, inplace=True, num_blocks=2, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert snapshot(model) == before
    assert not hasattr(model, "attnres") and not hasattr(model, "attnres_report")
    model(**inputs) if isinstance(inputs, dict) else model(inputs)


def test_a_model_that_no_front_end_can_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise TypeError("not followed")

    monkeypatch.setattr(trace, "_run", fails)
    model = seeded(Branching)
    before = snapshot(model)
    words = r"(?s)Branching could not be traced.*torch.export.*Dynamo.*symbolic.*a run: TypeError: not followed"
    with pytest.raises(ac.CaptureError, match=words):
        ac.transform(model, X, inplace=True)
    assert snapshot(model) == before


@pytest.mark.parametrize("name", ["bert", "resnet"])
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "in place"])
def test_not_strict(name: str, inplace: bool) -> None:
    original = CASES[name].build(layers=2)
    expected = run(name, original)
    model = ac.transform(original, example(name), strict=False, inplace=inplace)
    assert type(model) is type(original)
    assert model.state_dict().keys() == original.state_dict().keys()
    assert torch.equal(run(name, model), expected)
    report: Any = model.attnres_report
    assert report.chains == () and report.parameters == 0 and len(report.refused) > 0
    assert "refused" in str(report) and not attnres_parameters(model)
    assert (model is original) == inplace


def test_inspect_refuses_nothing() -> None:
    model = CASES["bert"].build(layers=2)
    before = snapshot(model)
    report = ac.inspect(model, example("bert"))
    assert report.chains == () and len(report.refused) > 0
    assert snapshot(model) == before


# One of two chains


@pytest.mark.parametrize("chains", [[1], lambda index: index > 0], ids=["indices", "callable"])
def test_one_chain_of_two(chains: Any) -> None:
    original: Any = CASES["t5"].build(layers=2)
    model: Any = ac.transform(original, example("t5"), num_blocks=2, chains=chains, verify="quick")
    assert set(model.state_dict()) - set(original.state_dict()) == {QUERY, "attnres.0.key_norm"}
    assert model.get_parameter(QUERY).shape == (6, WIDTH)
    assert [chain.rewritten for chain in model.attnres_report.chains] == [False, True]
    assert_close(run("t5", model), run("t5", original))
    randomise(model)
    assert relative_error(run("t5", model), run("t5", original)) > 1e-3
    actual, expected = (each.encoder(example("t5")["input_ids"]).last_hidden_state for each in (model, original))
    assert torch.equal(actual, expected)
    for mine, theirs in zip(model.encoder.modules(), original.encoder.modules(), strict=True):
        assert len(mine._forward_pre_hooks) == len(theirs._forward_pre_hooks)
        assert len(mine._forward_hooks) == len(theirs._forward_hooks)


def test_the_other_chain_of_two() -> None:
    original: Any = CASES["whisper"].build(layers=2)
    model: Any = ac.transform(original, example("whisper"), num_blocks=2, chains=lambda index: index == 0, verify="off")
    assert model.get_parameter(QUERY).shape == (4, WIDTH)
    randomise(model)
    features, tokens = example("whisper")["input_features"], example("whisper")["decoder_input_ids"]
    encoded = model.model.encoder(features).last_hidden_state
    assert relative_error(encoded, original.model.encoder(features).last_hidden_state) > 1e-3
    expected = original(decoder_input_ids=tokens, encoder_outputs=(encoded,)).logits
    assert_close(run("whisper", model), expected)


def test_chains_train_apart() -> None:
    _, model = pair("t5")
    projection(run("t5", model)).backward()
    assert all(model.get_parameter(f"attnres.{i}.query").grad.any(dim=-1).all() for i in range(2))


def exported(model: nn.Module) -> Any:
    return torch.export.export(model, (X,), strict=False)


@pytest.mark.parametrize("route", ["live", "program", "graph"])
def test_a_chain_that_would_learn_nothing(route: str) -> None:
    """It is left out with the reason, and the other one is rewritten; where `chains=` asks for it, it is refused."""
    model = seeded(Codes)
    subject = {"live": lambda: model, "program": lambda: exported(model), "graph": lambda: exported(model).module()}
    result: Any = ac.transform(subject[route](), None if route == "program" else (X,))
    report = result.attnres_report
    assert [(chain.rewritten, chain.adds) for chain in report.chains] == [(False, 4), (True, 4)]
    (lost,) = (refusal for refusal in report.refused if refusal.reason.startswith("nothing would learn from its reads"))
    assert lost.node == "chain 0"
    assert "layers.py" in lost.where or "parts.py" in lost.where
    assert report.options["chains"] == [1]
    assert all(check.passed for check in report.checks)
    run_it = result.module() if route == "program" else result
    assert_close(run_it(X), model(X))
    with pytest.raises(ac.RefusedError, match="do not depend on the reads of every chain"):
        ac.transform(subject[route](), None if route == "program" else (X,), chains=[0, 1])
