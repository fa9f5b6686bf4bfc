"""The one table of tolerances, and the one way to compare numbers."""

from typing import Final

import torch
from torch import Tensor

# Largest error relative to the largest expected magnitude. A test that needs more has found something.
TOLERANCE: Final[dict[torch.dtype, float]] = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """`max|actual - expected| / max|expected|` in fp64: 0 if both are zero or empty, inf if only `expected` is zero."""
    if actual.numel() == 0:
        return 0.0
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    error, size = float((actual - expected).abs().max()), float(expected.abs().max())
    return error / size if size else (float("inf") if error else 0.0)


def assert_close(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Assert that `actual` equals `expected`, a reference of any dtype, to the tolerance of `actual`'s dtype.

    Shapes must be equal and all values finite; where a NaN is expected, test for it with `isnan`.
    """
    label = f"{what}: " if what else ""
    assert actual.shape == expected.shape, f"{label}shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    for name, tensor in (("actual", actual), ("expected", expected)):
        bad = int((~tensor.detach().isfinite()).sum())
        assert bad == 0, f"{label}{bad} of {tensor.numel()} {name} values are NaN or infinite"
    error, allowed = relative_error(actual, expected), TOLERANCE[actual.dtype]
    assert error <= allowed, (
        f"{label}relative error {error:.3g}, allowed {allowed:.3g} for {actual.dtype}, shape {tuple(actual.shape)}"
    )
