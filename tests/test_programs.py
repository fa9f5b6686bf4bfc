"""Odd residual programs: each exact with the expected pushes, or refused with the right reason."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.observer import Observer
from attnres_compile.verification import TOLERANCE
from tests.programs import FEATURES, PROGRAMS, Program


def sample(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, FEATURES, generator=torch.Generator().manual_seed(batch * 100 + length))


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("options", [{"block_size": 3}, {"block_size": 1}], ids=["blocks of 3", "full"])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))
def test_program(program: Program, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    model = program.build()
    if program.refused is not None:
        before = {name: id(module) for name, module in model.named_modules()}
        with pytest.raises(ac.RefusedError, match=program.refused):
            ac.transform(model, sample(2, 10), **options)
        assert {name: id(module) for name, module in model.named_modules()} == before
        return
    transformed = ac.transform(model, sample(2, 10), **options)
    report: Any = transformed.attnres_report
    assert sum(chain.adds for chain in report.chains) == program.pushes
    # Fresh models: a program may count its calls.
    fresh: nn.Module = program.build()
    with torch.no_grad(), Observer() as observer:
        actual = transformed(sample(2, 10))
        assert sum(observer.pushes.values()) == program.pushes
        expected = fresh(sample(2, 10))
        # An autocast region computes its branches in bfloat16.
        allowed = TOLERANCE[min(observer.dtypes, key=lambda dtype: dtype.itemsize)]
        assert error(actual, expected) <= allowed
        if program.name not in ONE_SHAPE:
            assert (
                error(transformed(sample(3, 7)), fresh(sample(3, 7)))
                <= TOLERANCE[min(observer.dtypes, key=lambda dtype: dtype.itemsize)]
            )


ONE_SHAPE: frozenset[str] = frozenset()
