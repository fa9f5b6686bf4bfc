"""Compares an ONNX file in ONNX Runtime with PyTorch. Importing this module needs ``onnxruntime``."""

from __future__ import annotations

import math
from os import PathLike

import onnxruntime
import torch
from torch import Tensor

from attnres_compile.errors import ExportError


class Session:
    """An ONNX file in ONNX Runtime on the CPU."""

    def __init__(self, path: str | PathLike[str]) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise ExportError(f"ONNX Runtime cannot load the exported model: {error}") from error

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run on ``inputs``, in the order of the file's inputs.

        Raises:
            ExportError: ONNX Runtime cannot run the file, or it has another number of inputs.
        """
        names = [value.name for value in self._session.get_inputs()]
        if len(names) != len(inputs):
            raise ExportError(f"the exported model has the inputs {names}, the call has {len(inputs)} tensors")
        feeds = {name: tensor.numpy(force=True) for name, tensor in zip(names, inputs, strict=True)}
        try:
            return [torch.from_numpy(value) for value in self._session.run(None, feeds)]
        except Exception as error:
            raise ExportError(f"ONNX Runtime cannot run the exported model: {error}") from error


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """``max |actual - expected|``; infinite where shapes or dtypes differ, or one value is NaN or infinite."""
    expected = expected.detach().cpu()
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    if actual.numel() == 0 or torch.equal(actual, expected):
        return 0.0
    wide = torch.complex128 if actual.is_complex() else torch.float64
    difference = (actual.to(wide) - expected.to(wide)).abs().masked_fill(actual == expected, 0.0)
    return float(difference.nan_to_num(nan=math.inf).max())
