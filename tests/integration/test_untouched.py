"""The original is left as it was, to the last hook, and still runs."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.integration.models import BLOCKS, QUERY, example, randomise, run
from tests.integration.snapshot import snapshot
from tests.programs import PROGRAMS
from tests.tolerances import assert_close, relative_error
from tests.zoo import CASES, noise

NAMES = ("llama", "gpt2", "nanogpt", "torch_encoder")
X = noise(2, 7, 5)


def mixed(name: str) -> nn.Module:
    """A model with a frozen parameter, a gradient, a hook, and layers in different modes."""
    model = CASES[name].build(layers=2)
    parameters = list(model.parameters())
    parameters[0].requires_grad_(False)
    parameters[1].grad = torch.ones_like(parameters[1])
    modules = list(model.modules())
    for module in modules[len(modules) // 2 :]:
        module.training = True
    modules[1].register_forward_hook(lambda module, args, output: None)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_a_transform_leaves_the_original_alone(name: str) -> None:
    original = mixed(name)
    expected = run(name, original)
    before, generator = snapshot(original), torch.get_rng_state()
    model = ac.transform(original, example(name), num_blocks=2)
    assert torch.equal(torch.get_rng_state(), generator)
    assert snapshot(original) == before
    assert model is not original
    assert [module.training for module in original.modules()] == [m.training for m in model.modules()][
        : _size(original)
    ]
    randomise(model)
    assert torch.equal(run(name, original), expected)
    assert relative_error(run(name, model), expected) > 1e-3
    assert torch.is_grad_enabled()


def _size(model: nn.Module) -> int:
    return len(list(model.modules()))


@pytest.mark.parametrize("call", ["inspect", "verify", "transform"])
def test_no_call_changes_what_it_is_given(call: str) -> None:
    original = mixed("llama")
    model = ac.transform(original, example("llama"), num_blocks=2, verify="off")
    randomise(model)
    before = snapshot(original), snapshot(model)
    expected = run("llama", model)
    if call == "inspect":
        ac.inspect(original, example("llama"), num_blocks=2)
    elif call == "transform":
        ac.transform(original, example("llama"), block_size=1, verify="quick")
    else:
        assert all(check.passed for check in ac.verify(original, model, example("llama")))
    assert (snapshot(original), snapshot(model)) == before
    assert torch.equal(run("llama", model), expected)


@pytest.mark.parametrize("name", ["llama", "nanogpt"])
def test_in_place(name: str) -> None:
    original: Any = CASES[name].build(layers=3)
    expected, kept = run(name, original), dict(original.named_parameters())
    model = ac.transform(original, example(name), num_blocks=BLOCKS, inplace=True)
    assert model is original
    assert all(original.get_parameter(key) is parameter for key, parameter in kept.items())
    assert_close(run(name, model), expected)
    randomise(model)
    apart = ac.transform(CASES[name].build(layers=3), example(name), num_blocks=BLOCKS, verify="off")
    randomise(apart)
    assert torch.equal(run(name, model), run(name, apart))
    assert str(model.attnres_report).count("✓") == len(model.attnres_report.checks) > 0


def test_two_transforms_of_one_original() -> None:
    """They share the original's parameters, and each has its own reads and blocks."""
    original = CASES["nanogpt"].build(layers=3)
    few, many = (ac.transform(original, example("nanogpt"), verify="off", **options) for options in SIZES)
    assert few.get_parameter("head.weight") is many.get_parameter("head.weight")
    randomise(few)
    expected = run("nanogpt", few)
    randomise(many, seed=1)
    assert torch.equal(run("nanogpt", few), expected)
    assert relative_error(run("nanogpt", many), expected) > 1e-3
    with torch.no_grad():
        many.get_parameter(QUERY).copy_(few.get_parameter(QUERY))
        many.get_parameter("attnres.0.key_norm").copy_(few.get_parameter("attnres.0.key_norm"))
    assert relative_error(run("nanogpt", many), expected) > 1e-3


SIZES: tuple[dict[str, Any], ...] = ({"num_blocks": 2}, {"block_size": 1})


@pytest.mark.parametrize("name", sorted(name for name, program in PROGRAMS.items() if program.refused)[::3])
def test_refused_programs_are_left_alone(name: str) -> None:
    model = PROGRAMS[name].build()
    model.train()
    before, generator = snapshot(model), torch.get_rng_state()
    with pytest.raises(ac.AttnResError):
        ac.transform(model, X, num_blocks=2, inplace=True)
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert not hasattr(model, "attnres")


class Counting(nn.Module):
    """Counts its calls, in a buffer and in an attribute, and keeps its last output."""

    last: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.net = PROGRAMS["SumOfPair"].build()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.count, self.last = 0, None

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.calls, Tensor)
        self.calls += 1
        self.count += 1
        output: Tensor = self.net(self.norm(x.transpose(1, 2)).transpose(1, 2))
        self.last = output.detach()
        return output


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "in place"])
def test_no_call_is_seen_in_the_models_state(inplace: bool) -> None:
    original = Counting().train()
    before = snapshot(original)
    model: Any = ac.transform(original, X, num_blocks=2, inplace=inplace, verify="quick")
    assert (model.count, int(model.get_buffer("calls")), model.last) == (0, 0, None)
    assert torch.equal(model.norm.get_buffer("running_mean"), torch.zeros(5))
    if not inplace:
        assert snapshot(original) == before
        model(X)
        assert original.count == 0 and snapshot(original) == before


def test_a_transformed_model_can_be_transformed_back() -> None:
    """Dropping the transformed model leaves nothing behind on the original, which can be transformed anew."""
    original = CASES["nanogpt"].build(layers=2)
    before = snapshot(original)
    for options in SIZES:
        model = ac.transform(original, example("nanogpt"), verify="off", **options)
        assert_close(run("nanogpt", model), run("nanogpt", copy.deepcopy(original)))
        assert snapshot(original) == before
