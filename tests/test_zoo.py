"""The zoo's models do what the other tests rely on."""

import pytest
import torch
from torch import Tensor, nn

from tests.one_thread import one_thread as one_thread
from tests.zoo import CASES, LAYERS, Case

SHAPES = ((2, 8), (3, 11))
DTYPES = (torch.float32, torch.float64)
NO_DROPOUT = {"mamba2", "resnet"}
# Mamba2 casts its logits to float32
OUTPUT_DTYPES = {("mamba2", torch.float64): torch.float32}

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def inputs(case: Case, batch: int, length: int, dtype: torch.dtype) -> dict[str, Tensor]:
    values = case.inputs(batch, length)
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in values.items()}


def seeded_forward(case: Case, model: nn.Module, dtype: torch.dtype, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return case.output(model(**inputs(case, 3, 11, dtype)))


@every_dtype
@every_case
def test_eval_is_deterministic(case: Case, dtype: torch.dtype) -> None:
    models = case.build().to(dtype), case.build().to(dtype)
    for batch, length in SHAPES:
        with torch.no_grad():
            first, second = (case.output(model(**inputs(case, batch, length, dtype))) for model in models)
        assert first.dtype == OUTPUT_DTYPES.get((case.name, dtype), dtype)
        assert first.isfinite().all()
        assert torch.equal(first, second)


@every_dtype
@every_case
def test_training_is_deterministic_for_a_seed(case: Case, dtype: torch.dtype) -> None:
    model = case.build().to(dtype).train()
    first, second, other = (seeded_forward(case, model, dtype, seed) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert torch.equal(first, other) == (case.name in NO_DROPOUT)
    first.square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    # what gets none: DINOv2's mask token and Whisper's fixed positions
    assert len(gradients) >= len(list(model.parameters())) - 1
    assert all(gradient.isfinite().all() for gradient in gradients)


@every_case
def test_float64_throughout(case: Case) -> None:
    """A step of 1e-8 in the weights changes the output smoothly, unless the rounding of float32 comes between."""
    model = case.build().double()
    parameters = list(model.parameters())
    torch.manual_seed(0)
    steps = [1e-8 * torch.randn_like(parameter) for parameter in parameters]
    outputs = []
    with torch.no_grad():
        for _ in range(3):
            outputs.append(case.output(model(**inputs(case, 2, 8, torch.float64))))
            for parameter, step in zip(parameters, steps, strict=True):
                parameter.add_(step)
    start, once, twice = outputs
    bend = (twice - 2 * once + start).norm() / (once - start).norm()
    assert (bend < 1e-4) == case.pure64


@every_case
def test_names_of_inputs_and_counts(case: Case) -> None:
    values = case.inputs(2, 8)
    assert values.keys() == case.dynamic.keys()
    assert all(torch.equal(value, case.inputs(2, 8)[name]) for name, value in values.items())
    assert len(case.adds) == len(case.sublayers)
    assert all(0 < s <= a and s % LAYERS == 0 for a, s in zip(case.adds, case.sublayers, strict=True))


@every_case
def test_number_of_layers(case: Case) -> None:
    sizes = [sum(parameter.numel() for parameter in case.build(layers=n).parameters()) for n in (2, 3, LAYERS)]
    assert sizes[0] < sizes[1] < sizes[2]


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_global_generator_is_left_alone(name: str) -> None:
    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    CASES[name].build()
    assert torch.rand(()) == expected
