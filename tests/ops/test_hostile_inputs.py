"""Inputs that break softmaxes and norms: against the reference in fp64, forward and gradients."""

import pytest
import torch

from tests.ops.test_ops import F32, F64, HALF, Case, check, check_gradients, gradients
from tests.tolerances import TOLERANCE, assert_close


def with_gradients(case: Case) -> Case:
    for tensor in case.tensors():
        tensor.requires_grad_()
    return case


@pytest.mark.parametrize("dtype", [F64, F32, *HALF])
def test_identical_sources(dtype: torch.dtype) -> None:
    case = Case(6, dtype=dtype)
    case.sources = [case.sources[0].clone() for _ in case.sources]
    check(case)
    case = with_gradients(case)
    exact = case.double()
    pairs = zip(
        gradients(case.depth_attention(), case), gradients(exact.expected_depth_attention(), exact), strict=True
    )
    actual, expected = zip(*pairs, strict=True)
    for a, e in zip(actual[:6], expected[:6], strict=True):
        assert_close(a, e)
    # All logits are equal whatever the query is.
    size = float(sum(e.abs().sum() for e in expected[:6]))
    assert all(float(a.abs().max()) <= TOLERANCE[dtype] * size for a in actual[6:])


@pytest.mark.parametrize("which", [0, 2, 5])
@pytest.mark.parametrize("dtype", [F64, F32, *HALF])
def test_one_source_is_zero(dtype: torch.dtype, which: int) -> None:
    """Its gradient through the logits is of the size 1 / sqrt(eps)."""
    case = Case(6, dtype=dtype)
    case.sources[which] = torch.zeros_like(case.sources[which])
    check(case)
    if dtype in (F32, F64):
        check_gradients(with_gradients(case))


@pytest.mark.parametrize("size", [6e4, 1e4, 6e-5, 6e-8])
def test_fp16_near_its_limits(size: float) -> None:
    """The largest finite number is 65504, the smallest normal one 6.1e-5; squares of either leave the range."""
    case = Case(6, dtype=torch.float16)
    case.scale = 1.0
    case.sources = [(x.float() / x.float().abs().max() * size).half() for x in case.sources]
    exact = case.double()
    assert all(x.isfinite().all() for x in case.sources)
    h = case.depth_attention()
    expected = exact.expected_depth_attention()
    assert h.isfinite().all()
    # The spacing of subnormal numbers, where the result lies among them.
    allowed = max(4e-3 * float(expected.abs().max()), 6e-8)
    assert float((h.double() - expected).abs().max()) <= allowed


@pytest.mark.parametrize("scale", [1e18, 1e-18])
def test_extreme_sources_among_ordinary_ones(scale: float) -> None:
    case = Case(6)
    case.sources[1], case.sources[4] = case.sources[1] * scale, case.sources[4] * scale
    check(case)


def test_many_sources() -> None:
    case = Case(257, (3,), 40)
    check(case)
    check_gradients(with_gradients(case))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_token(value: float) -> None:
    case = Case(4, (6,), 48)
    clean = case.inter_block()
    case.sources[1][2, 5] = value
    touched = torch.arange(6) == 2
    for before, after in zip(clean, case.inter_block(), strict=True):
        rest = [x.movedim(1, 0)[~touched] for x in (before, after)]
        assert torch.equal(*rest)
    assert not case.depth_attention()[touched].isfinite().all()
