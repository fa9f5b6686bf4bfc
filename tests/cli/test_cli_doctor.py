"""`attnres doctor` says what works, and what to do about the rest."""

import os
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from attnres_compile import cli_doctor
from attnres_compile.cli import app
from attnres_compile.ops import cpu
from attnres_compile.ops.cpu import build


def test_every_part_is_listed() -> None:
    found = {name: (works, what) for name, works, what in cli_doctor.findings()}
    assert list(found) == [
        "torch",
        "CPU kernels",
        "Triton kernels",
        "CUDA",
        "onnx",
        "hf",
        "plot",
        "ONNX Runtime",
        "tensorrt",
        "tensorrt_rtx",
    ]
    assert torch.__version__ in found["torch"][1]
    assert found["CPU kernels"] == (cpu.available(), cpu.reason() or "built for this machine")
    assert all(what for _, what in found.values())


def test_what_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli_doctor.OPTIONAL, "onnx", ("onnx", "no-such-package"))
    (line,) = [what for name, _, what in cli_doctor.findings() if name == "onnx"]
    assert line == "no-such-package missing: pip install 'attnres-compile[onnx]'"


def test_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", SimpleNamespace(__version__="1.7.1"))
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    found = {name: (works, what) for name, works, what in cli_doctor.findings()}
    assert found["tensorrt_rtx"] == (True, f"tensorrt_rtx 1.7.1; {cli_doctor.LIBRARIES['tensorrt_rtx']}")
    works, what = found["tensorrt"]
    assert not works
    assert what.startswith("tensorrt missing: pip install 'attnres-compile[tensorrt]'; builds and runs engines")


@pytest.mark.skipif(os.environ.get(build.SWITCH) == "0", reason="the kernels are turned off")
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++"))), reason="there is no C++ compiler")
def test_kernels_are_built_where_there_is_a_compiler() -> None:
    assert cpu.available(), cpu.reason()


def test_kernels_that_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available", lambda: False)
    monkeypatch.setattr(cpu, "reason", lambda: "no C++ compiler")
    assert ("CPU kernels", False, "no C++ compiler") in cli_doctor.findings()


def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "CPU kernels" in result.stdout
    assert "CPUExecutionProvider" in result.stdout
    assert "pip install 'attnres-compile[tensorrt]'" in result.stdout
    assert torch.__version__ in result.stdout
