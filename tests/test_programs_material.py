"""The odd programs run as they are, on any shape, before anything is done to them."""

import pytest
import torch
from torch import Tensor, nn

from tests.one_thread import one_thread as one_thread
from tests.programs import FEATURES, PROGRAMS, Program

SHAPES = ((2, 10), (3, 7))
# no two calls of these agree, for they count or average what they see
CHANGING = {"BufferWrite", "Counter"}
# what a sample gives depends on the others, or, under bfloat16, on how the sums are split
BATCHED = CHANGING | {"AutocastInside", "DividedByBatch", "KeptOnModule", "LengthOfBatch", "TupleState"}

every_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
every_dtype = pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)


def noise(batch: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, length, FEATURES, generator=generator, dtype=dtype)


def trained(model: nn.Module, x: Tensor, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    y: Tensor = model.train()(x)
    y.square().mean().backward()
    return y


@every_dtype
@every_program
def test_eval(program: Program, dtype: torch.dtype) -> None:
    model, again = program.build().to(dtype), program.build().to(dtype)
    for batch, length in SHAPES:
        x = noise(batch, length, dtype)
        with torch.no_grad():
            y = model(x)
            assert y.dtype == dtype
            assert len(y) == batch
            assert y.isfinite().all()
            assert torch.equal(y, again(x))
            assert torch.equal(y, model(x)) == (program.name not in CHANGING)
            again(x)


@every_dtype
@every_program
def test_training(program: Program, dtype: torch.dtype) -> None:
    model, again = program.build().to(dtype), program.build().to(dtype)
    for batch, length in SHAPES:
        x = noise(batch, length, dtype)
        assert torch.equal(trained(model, x), trained(again, x))
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - BATCHED))
def test_samples_are_independent(name: str) -> None:
    x = noise(3, 7, torch.float64)
    with torch.no_grad():
        alone, among = (PROGRAMS[name].build().double()(y)[:2] for y in (x[:2], x))
    torch.testing.assert_close(alone, among)


def test_descriptions() -> None:
    assert len(PROGRAMS) > 80
    for name, program in PROGRAMS.items():
        assert program.name == name
        assert (program.pushes is None) == (program.refused is not None)
        assert program.note.endswith(".")
