"""Training: modes, dropout, checkpointing, hooks, adapters, and steps that move the queries."""

import copy
import warnings
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attnres_compile as ac
from attnres_compile.stream import Stream
from tests.integration.models import (
    BLOCKS,
    KEY_NORM,
    LAYERS,
    QUERY,
    assert_same_gradients,
    attnres_parameters,
    example,
    gradients,
    pair,
    projection,
    randomise,
    run,
    transformed,
)
from tests.programs import PROGRAMS
from tests.tolerances import assert_close, relative_error
from tests.zoo import CASES, noise

NAMES = ("llama", "gpt2", "nanogpt", "t5")
REENTRANT = {"use_reentrant": True}
NOT_REENTRANT = {"use_reentrant": False}


def layers_of(name: str, model: Any) -> nn.ModuleList:
    return {"llama": lambda: model.model.layers, "gpt2": lambda: model.transformer.h}[name]()


def container_of(name: str, model: Any) -> nn.Module:
    return {"llama": lambda: model.model, "gpt2": lambda: model.transformer}[name]()


# Modes and dropout


@pytest.mark.parametrize("name", NAMES)
def test_training_draws_the_same_random_numbers(name: str) -> None:
    original, model = pair(name)
    expected, actual = run(name, original.train(), seed=3), run(name, model.train(), seed=3)
    drawn = torch.rand(())
    assert_close(actual, expected)
    assert relative_error(expected, run(name, original, seed=4)) > 1e-3
    run(name, original, seed=3)
    assert torch.equal(torch.rand(()), drawn)


@pytest.mark.parametrize("name", NAMES)
def test_modes_reach_every_module(name: str) -> None:
    model = transformed(name)
    before = run(name, model)
    assert all(module.training for module in model.train().modules())
    assert relative_error(run(name, model), before) > 1e-3
    assert not any(module.training for module in model.eval().modules())
    assert torch.equal(run(name, model), before)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_originals_at_zero_queries(name: str) -> None:
    original, model = pair(name)
    expected, actual = gradients(name, original.train()), gradients(name, model.train())
    new = {key: actual.pop(key) for key in list(actual) if key not in expected}
    assert new.keys() == attnres_parameters(model).keys()
    assert all(value.any(dim=-1).all() for key, value in new.items() if key.endswith("query"))
    assert_same_gradients(actual, expected)


# Checkpointing


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    model = transformed(name).train()
    expected = gradients(name, model)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=NOT_REENTRANT)
    assert model.is_activation_checkpointing
    assert_same_gradients(gradients(name, model), expected)
    assert attnres_parameters(model).keys() <= expected.keys()
    assert all(expected[key].any(dim=-1).all() for key in attnres_parameters(model))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradient_checkpointing_before_the_transform(name: str) -> None:
    original: Any = CASES[name].build(layers=2).train()
    original.activation_checkpointing_enable(activation_checkpointing_kwargs=NOT_REENTRANT)
    model: Any = ac.transform(original, example(name), num_blocks=2)
    randomise(model)
    expected = gradients(name, model)
    model.activation_checkpointing_disable()
    assert_same_gradients(gradients(name, model), expected)


@pytest.mark.parametrize("name", ["CheckpointedLayers", "CheckpointedLambdas", "CheckpointedSequence"])
def test_torch_checkpoint_of_layers(name: str) -> None:
    model = ac.transform(PROGRAMS[name].build(), noise(2, 7, 5), num_blocks=BLOCKS).train()
    randomise(model)
    found = []
    for checkpointed in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not checkpointed:
                plain: Any = lambda function, *args, use_reentrant: function(*args)  # noqa: E731
                patch.setattr("tests.programs.checkpoints.checkpoint", plain)
                in_order: Any = lambda stack, segments, x, use_reentrant: stack(x)  # noqa: E731
                patch.setattr("tests.programs.checkpoints.checkpoint_sequential", in_order)
            model.zero_grad()
            projection(model(noise(3, 9, 5))).backward()
        found.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == dict(model.named_parameters()).keys()
    assert_same_gradients(*found)


def test_checkpointing_of_the_whole_model() -> None:
    model = transformed("nanogpt").train()
    expected = gradients("nanogpt", model)
    torch.manual_seed(0)
    projection(checkpoint(model, example("nanogpt")["input_ids"], use_reentrant=False)).backward()
    assert_same_gradients({key: p.grad for key, p in model.named_parameters() if p.grad is not None}, expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_reentrant_checkpointing_is_refused_by_the_transform(name: str) -> None:
    original: Any = CASES[name].build(layers=2).train()
    original.activation_checkpointing_enable(activation_checkpointing_kwargs=REENTRANT)
    with pytest.raises(ac.RefusedError, match="use_reentrant=False"):
        ac.transform(original, example(name), num_blocks=2)
    assert not hasattr(original, "attnres")
    assert original.is_activation_checkpointing


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_reentrant_checkpointing_is_refused_afterwards(name: str) -> None:
    model = pair(name)[1].train()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=REENTRANT)
    with warnings.catch_warnings(), pytest.raises(ac.RefusedError, match="use_reentrant=False"):
        warnings.simplefilter("ignore")  # torch's own, about inputs without gradient
        run(name, model)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=NOT_REENTRANT)
    projection(run(name, model)).backward()
    assert model.get_parameter(QUERY).grad.any()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_reentrant_checkpointing_is_refused_where_the_queries_alone_train(name: str) -> None:
    model = pair(name)[1].train()
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("attnres." in key)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=REENTRANT)
    with warnings.catch_warnings(), pytest.raises(ac.RefusedError, match="use_reentrant=False"):
        warnings.simplefilter("ignore")
        run(name, model)


def test_reentrant_checkpointing_is_no_matter_without_gradients() -> None:
    original, model = pair("llama")
    model.train().activation_checkpointing_enable(activation_checkpointing_kwargs=REENTRANT)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = run("llama", model)
    assert_close(actual, run("llama", original.train()))


# Hidden states and hooks


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
@pytest.mark.parametrize("training", [False, True])
def test_hidden_states(name: str, training: bool) -> None:
    original, model = (model.train(training) for model in pair(name))
    outputs = []
    for each in (original, model):
        torch.manual_seed(0)
        outputs.append(each(**example(name), output_hidden_states=True))
    assert len(outputs[1].hidden_states) == len(outputs[0].hidden_states) == LAYERS + 1
    for actual, expected in zip(outputs[1].hidden_states, outputs[0].hidden_states, strict=True):
        assert type(actual) is Tensor
        assert_close(actual, expected)
    assert_close(outputs[1].logits, outputs[0].logits)


def test_hidden_states_of_an_encoder_and_a_decoder() -> None:
    original, model = pair("t5")
    expected, actual = (each(**example("t5"), output_hidden_states=True) for each in (original, model))
    for key in ("encoder_hidden_states", "decoder_hidden_states"):
        assert [type(hidden) for hidden in actual[key]] == [Tensor] * (LAYERS + 1)
        for mine, theirs in zip(actual[key], expected[key], strict=True):
            assert_close(mine, theirs)
    assert type(actual.encoder_last_hidden_state) is Tensor


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_hidden_states_with_random_queries(name: str) -> None:
    model = transformed(name)
    output = model(**example(name), output_hidden_states=True)
    last = container_of(name, model)(**example(name)).last_hidden_state
    assert [type(hidden) for hidden in output.hidden_states] == [Tensor] * (LAYERS + 1)
    assert type(last) is Tensor
    assert_close(output.hidden_states[-1], last)
    assert torch.equal(output.logits, run(name, model))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("before", [False, True], ids=["hooks after", "hooks before"])
def test_user_hooks_see_what_they_saw(name: str, before: bool) -> None:
    original, model = pair(name)
    seen: dict[int, list[tuple[str, Any]]] = {0: [], 1: []}
    for number, each in enumerate((original, model)):

        def watch(label: str, module: nn.Module, number: int = number) -> None:
            module.register_forward_hook(lambda *call: seen[number].append((label, call[2])))

        for index, layer in enumerate(layers_of(name, each)):
            watch(f"layer {index}", layer)
        watch("container", container_of(name, each))
        watch("root", each)
    if before:
        model = ac.transform(original, example(name), num_blocks=BLOCKS, verify="off")
        seen[0].clear()
        run(name, model)
        # the copies of the lambdas still append to the same list
        seen[1], seen[0] = seen[0], []
    else:
        run(name, model)
    run(name, original)
    assert [label for label, _ in seen[1]] == [label for label, _ in seen[0]] and len(seen[1]) == LAYERS + 2
    for (label, actual), (_, expected) in zip(seen[1], seen[0], strict=True):
        if label.startswith("layer"):
            actual, expected = _first(actual), _first(expected)
            assert isinstance(actual, Stream) and isinstance(actual, Tensor)
            assert actual.shape == expected.shape and actual.dtype == expected.dtype
            assert_close(actual.norm(dim=-1), expected.norm(dim=-1), label)
            assert_close(actual.detach().numpy().mean() + torch.zeros(()), expected.mean(), label)
        else:
            tensors = [value for value in actual.values() if isinstance(value, Tensor)]
            assert tensors and all(type(value) is Tensor for value in tensors)
            for mine, theirs in zip(tensors, (v for v in expected.values() if isinstance(v, Tensor)), strict=True):
                assert_close(mine, theirs, label)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_steering_hooks(name: str) -> None:
    """A hook that adds to a layer's output, one that scales it, and one that replaces it."""
    vector = noise(1, 32)
    for change in (lambda x: x + vector, lambda x: 1.5 * x, lambda x: x * torch.sigmoid(vector), lambda x: x.clone()):
        outputs = []
        for model in pair(name):

            def steer(module: nn.Module, args: Any, output: Any, change: Any = change) -> Any:
                changed = change(_first(output))
                return (changed, *output[1:]) if isinstance(output, tuple) else changed

            layers_of(name, model)[1].register_forward_hook(steer)
            outputs.append(run(name, model))
        assert_close(outputs[1], outputs[0])


# Adapters


def lora(model: nn.Module, **settings: Any) -> Any:
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "down_proj"]
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=4, target_modules=targets, **settings))
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                parameter.copy_(noise(*parameter.shape) * 0.1)
    return adapted


def test_lora_at_zero_queries() -> None:
    original, model = pair("llama")
    expected, actual = lora(original), lora(model)
    assert_close(run("llama", actual), run("llama", expected))
    assert relative_error(run("llama", actual), run("llama", original)) > 1e-3
    assert_same_gradients(gradients("llama", actual), gradients("llama", expected))


def test_lora_trains_the_queries_through_modules_to_save() -> None:
    model = transformed("llama")
    adapted = lora(model, modules_to_save=["attnres.0"])
    before = run("llama", adapted)
    assert_close(before, run("llama", lora(model)))
    trained = {key: p for key, p in adapted.named_parameters() if p.requires_grad and "attnres" in key}
    assert len(trained) == 2
    found = gradients("llama", adapted)
    assert all(found[key].any(dim=-1).all() for key in trained)
    assert not [key for key in found if "attnres" in key and key not in trained]
    with torch.no_grad():
        next(p for key, p in trained.items() if key.endswith("query")).neg_()
    after = run("llama", adapted)
    assert relative_error(after, before) > 1e-3
    assert_close(run("llama", adapted.merge_and_unload()), after)


def test_lora_files_hold_the_queries(tmp_path: Any) -> None:
    model = transformed("llama")
    adapted = lora(model, modules_to_save=["attnres.0"])
    with torch.no_grad():
        next(p for key, p in adapted.named_parameters() if p.requires_grad and key.endswith("query")).neg_()
    adapted.save_pretrained(tmp_path)
    restored = peft.PeftModel.from_pretrained(model, tmp_path)
    assert_close(run("llama", restored), run("llama", adapted))


# Steps


@pytest.mark.parametrize("name", ["llama", "nanogpt"])
@pytest.mark.parametrize("alone", [False, True], ids=["everything", "queries alone"])
def test_training_moves_the_queries(name: str, alone: bool) -> None:
    model = pair(name)[1].eval()
    frozen = {key: p.detach().clone() for key, p in model.named_parameters() if "attnres." not in key}
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(not alone or "attnres." in key)
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    tokens = example(name)["input_ids"]
    losses = []
    for _ in range(15):
        logits = run(name, model)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] * (0.98 if alone else 0.5)
    assert (model.get_parameter(QUERY).abs().sum(-1) > 1e-3).all()
    assert not torch.equal(model.get_parameter(KEY_NORM), torch.ones(6, 32))
    if alone:
        assert all(torch.equal(model.get_parameter(key), value) for key, value in frozen.items())
