"""What a transformed model is: its class, its parameters, its copies and its files."""

import copy
import inspect
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attnres_compile as ac
from attnres_compile.reads import DepthReads
from tests.integration.models import (
    BLOCKS,
    KEY_NORM,
    QUERY,
    READS,
    attnres_parameters,
    example,
    pair,
    randomise,
    run,
    transformed,
)
from tests.tolerances import assert_close, relative_error
from tests.zoo import CASES, WIDTH

NAMES = ("llama", "gpt2", "nanogpt")
every_name = pytest.mark.parametrize("name", NAMES)


@every_name
def test_class_and_signature_are_the_originals(name: str) -> None:
    original, model = pair(name)
    assert type(model) is type(original)
    assert inspect.signature(model.forward) == inspect.signature(original.forward)
    assert model.training is original.training is False
    names = [key for key, _ in original.named_modules()]
    assert [key for key, _ in model.named_modules()] == [*names, "attnres", "attnres.0"]
    assert [type(module) for _, module in model.named_modules()][: len(names)] == [type(m) for m in original.modules()]


@every_name
def test_state_dict_gains_the_reads_alone(name: str) -> None:
    original, model = pair(name)
    before, after = original.state_dict(), model.state_dict()
    assert list(after) == [*before, QUERY, KEY_NORM]
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert after[QUERY].shape == after[KEY_NORM].shape == (READS, WIDTH)
    assert torch.equal(after[QUERY], torch.zeros(READS, WIDTH))
    assert torch.equal(after[KEY_NORM], torch.ones(READS, WIDTH))
    shared = dict(original.named_parameters())
    assert shared.keys() | {QUERY, KEY_NORM} == dict(model.named_parameters()).keys()
    assert all(model.get_parameter(key) is parameter for key, parameter in shared.items())


def test_two_chains_have_two_entries() -> None:
    original, model = pair("t5")
    new = [key for key in model.state_dict() if key not in original.state_dict()]
    assert new == [QUERY, KEY_NORM, "attnres.1.query", "attnres.1.key_norm"]
    assert model.get_parameter("attnres.1.query").shape == (9, WIDTH)


def test_without_key_norm_there_are_queries_alone() -> None:
    original = CASES["nanogpt"].build(layers=2)
    model = ac.transform(original, example("nanogpt"), num_blocks=2, key_norm=False)
    assert set(model.state_dict()) - set(original.state_dict()) == {QUERY}
    assert_close(run("nanogpt", model), run("nanogpt", original))
    randomise(model)
    restored = pickle.loads(pickle.dumps(model))
    assert torch.equal(run("nanogpt", restored), run("nanogpt", model))


def test_original_checkpoint_loads_with_only_the_reads_missing() -> None:
    original, model = pair("llama")
    expected = run("llama", original)
    checkpoint = copy.deepcopy(original.state_dict())
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
    result = model.load_state_dict(checkpoint, strict=False)
    assert result.missing_keys == [QUERY, KEY_NORM]
    assert result.unexpected_keys == []
    assert_close(run("llama", model), expected)
    with pytest.raises(RuntimeError, match=QUERY):
        model.load_state_dict(checkpoint)


@every_name
def test_transformed_checkpoint_loads_exactly(name: str) -> None:
    source, target = transformed(name), pair(name)[1]
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(1)
    result = target.load_state_dict(source.state_dict())
    assert result.missing_keys == result.unexpected_keys == []
    assert torch.equal(run(name, target), run(name, source))


@pytest.mark.parametrize("name", [*NAMES, "t5"])
def test_a_deep_copy_follows_its_own_reads(name: str) -> None:
    model = transformed(name)
    before = run(name, model)
    copied = copy.deepcopy(model)
    assert torch.equal(run(name, copied), before)
    for key in attnres_parameters(model):
        last = run(name, copied)
        with torch.no_grad():
            copied.get_parameter(key).mul_(-0.5)
        assert relative_error(run(name, copied), last) > 1e-3, key
    assert torch.equal(run(name, model), before)


def test_a_copy_of_a_copy_does_not_keep_the_first() -> None:
    model = transformed("nanogpt")
    copied = copy.deepcopy(copy.deepcopy(model))
    modules = {id(module) for module in copied.modules()}
    roots = [getattr(hook, "root", None) for module in copied.modules() for hook in module._forward_pre_hooks.values()]
    starts = [root for root in roots if root is not None]
    assert starts and all(root is copied for root in starts)
    assert not modules & {id(module) for module in model.modules()}


@pytest.mark.parametrize("name", ["llama", "nanogpt", "t5"])
@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_serialised_whole(name: str, how: str) -> None:
    model = transformed(name)
    before = run(name, model)
    if how == "pickle":
        restored = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        restored = torch.load(buffer, weights_only=False)
    assert torch.equal(run(name, restored), before)
    with torch.no_grad():
        restored.get_parameter(QUERY).neg_()
    assert relative_error(run(name, restored), before) > 1e-3
    assert torch.equal(run(name, model), before)
    assert str(restored.attnres_report) == str(model.attnres_report)


def test_another_process_loads_it_without_importing_the_library(tmp_path: Path) -> None:
    model = transformed("nanogpt")
    torch.save((model, example("nanogpt")), tmp_path / "model.pt")
    code = (
        "import torch; model, i = torch.load('model.pt', weights_only=False); torch.save(model(**i).detach(), 'y.pt')"
    )
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r}); {code}"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert_close(torch.load(tmp_path / "y.pt"), run("nanogpt", model))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_pretrained_files(name: str, tmp_path: Path) -> None:
    original, model = pair(name, random=True)
    model.save_pretrained(tmp_path)
    plain, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert set(info["unexpected_keys"]) <= {QUERY, KEY_NORM}
    assert torch.equal(run(name, plain), run(name, original))

    again = ac.transform(plain, example(name), num_blocks=BLOCKS, verify="off")
    from safetensors.torch import load_file

    result = again.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    # the tied weight of the head is written once
    assert set(result.missing_keys) <= {"lm_head.weight"}
    assert result.unexpected_keys == []
    assert torch.equal(run(name, again), run(name, model))


def initialise_weights(model: Any) -> None:
    model.init_weights()


def initialise_anew(model: Any) -> None:
    model.post_init()


def initialise_each(model: Any) -> None:
    model.apply(model._init_weights)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("initialise", [initialise_weights, initialise_anew, initialise_each])
def test_queries_stay_zero_whatever_initialises(name: str, initialise: Any) -> None:
    model = pair(name)[1]
    initialise(model)
    for key, parameter in attnres_parameters(model).items():
        assert (parameter == (0 if key.endswith("query") else 1)).all(), key


def test_reset_parameters() -> None:
    model = transformed("nanogpt")
    for module in model.modules():
        if isinstance(module, DepthReads):
            module.reset_parameters()
    assert not model.get_parameter(QUERY).any()
    assert (model.get_parameter(KEY_NORM) == 1).all()
    assert all(parameter.requires_grad for parameter in attnres_parameters(model).values())


def test_parameters_follow_the_models_dtype() -> None:
    original = CASES["nanogpt"].build(layers=2).double()
    model: Any = ac.transform(original, example("nanogpt"), num_blocks=2)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert_close(run("nanogpt", model), run("nanogpt", original))
    randomise(model)
    in_double = run("nanogpt", model)
    assert {p.dtype for p in model.float().parameters()} == {torch.float32}
    assert relative_error(run("nanogpt", model), in_double) < 1e-5


def test_functional_call_replaces_the_reads() -> None:
    zero, model = pair("nanogpt")[1], transformed("nanogpt")
    values = {key: parameter.detach() for key, parameter in attnres_parameters(model).items()}
    actual = torch.func.functional_call(zero, values, kwargs=example("nanogpt"))
    assert torch.equal(actual, run("nanogpt", model))
    assert not zero.get_parameter(QUERY).any()


def test_replaced_parameters_are_followed() -> None:
    model = transformed("nanogpt")
    before = run("nanogpt", model)
    model.attnres[0].query = nn.Parameter(-model.attnres[0].query.detach())
    assert relative_error(run("nanogpt", model), before) > 1e-3
