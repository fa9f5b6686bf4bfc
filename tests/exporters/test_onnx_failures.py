"""What cannot be exported is said in a line, and leaves no file."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnres_compile.errors import ExportError, InputError, MissingDependencyError, OptionError
from attnres_compile.exporters import export_onnx, onnx_functions
from attnres_compile.exporters.onnx_functions import Form, function_proto
from tests.exporters.onnx_material import (
    WIDTH,
    Small,
    TwoPhase,
    normal,
    tokens,
)


def test_no_file_when_the_numbers_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(name: str, opset: int, form: Form) -> Any:
        function = function_proto(name, opset, form)
        for node in function.node:
            node.op_type = "Tanh" if node.op_type == "Sigmoid" else node.op_type
        return function

    monkeypatch.setattr(onnx_functions, "function_proto", wrong)
    path = tmp_path / "model.onnx"
    path.write_text("an earlier export")
    lines: list[str] = []
    with pytest.raises(ExportError, match="hidden"):
        export_onnx(Small(), normal(2, 3, WIDTH), path, echo=lines.append)
    assert any(line.startswith("✗ hidden max |Δ| ") for line in lines)
    assert any(line.startswith("✓ branch_0 max |Δ| ") for line in lines)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert path.read_text() == "an earlier export"


def test_no_file_when_the_graph_is_right_at_one_size_only(tmp_path: Path) -> None:
    class Baked(Small):
        def forward(self, x: Tensor) -> dict[str, Any]:
            rows = 2 if torch.compiler.is_exporting() else x.shape[0]
            return {"hidden": super().forward(x)["hidden"] * rows}

    with pytest.raises(ExportError, match="differs"):
        export_onnx(Baked(), normal(2, 3, WIDTH), tmp_path / "model.onnx", echo=None)
    assert not list(tmp_path.iterdir())


def test_unwritable_path_fails_before_the_work(tmp_path: Path) -> None:
    model = TwoPhase()
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing" / "model.onnx", tmp_path, tmp_path / "file" / "model.onnx"):
        with pytest.raises(ExportError, match="cannot write"):
            export_onnx(model, tokens(2, 5), path)
    assert model.calls == 0
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("module", ["onnx", "onnxscript", "onnx_ir", "onnxruntime"])
def test_missing_dependency(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"needs {module}.*pip install 'attnres-compile\[onnx\]'"):
        export_onnx(Small(), normal(2, 3, WIDTH), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_import_without_onnx() -> None:
    code = """
import sys
for name in ("onnx", "onnxscript", "onnx_ir", "onnxruntime"):
    sys.modules[name] = None
import attnres_compile.exporters
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_options_and_inputs_that_cannot_work(tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", normal(2, 3, WIDTH)
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (OptionError, "20 to 25", lambda: export_onnx(Small(), x, path, opset_version=26)),
        (OptionError, "20 to 25", lambda: export_onnx(Small(), x, path, opset_version=19)),
        (OptionError, "onnxruntime, tensorrt; got 'tvm'", lambda: export_onnx(Small(), x, path, target="tvm")),  # type: ignore[arg-type]
        (OptionError, "unrolled, tied, stacked, matmul", lambda: export_onnx(Small(), x, path, body="rolled")),  # type: ignore[arg-type]
        (InputError, "needs example_inputs", lambda: export_onnx(Small(), None, path)),
        (InputError, "missing a required argument: 'x'", lambda: export_onnx(Small(), {"y": x}, path)),
        (ExportError, r"\.float\(\)", lambda: export_onnx(Small().double(), x.double(), path)),
        (ExportError, "leave it out", lambda: export_onnx(Small(), x, path, dynamic_shapes={"x": {2: "width"}})),
    ]
    for error, message, export in cases:
        with pytest.raises(error, match=message):
            export()
    assert not list(tmp_path.iterdir())


def test_an_operator_that_onnx_does_not_have(tmp_path: Path) -> None:
    class Odd(Small):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return super().forward(x + torch.histc(x).sum())

    with pytest.raises(ExportError, match=r"cannot translate .*histc.* \(.*test_onnx_failures\.py:\d+") as caught:
        export_onnx(Odd(), normal(2, 3, WIDTH), tmp_path / "model.onnx")
    assert str(caught.value).count("\n") == 0
    assert not list(tmp_path.iterdir())


def test_no_file_when_killed(tmp_path: Path) -> None:
    code = f"""
import os, signal, torch
from attnres_compile.exporters import export_onnx
class Killed(torch.nn.Module):
    def forward(self, x):
        os.kill(os.getpid(), signal.SIGTERM)
        return x
export_onnx(Killed(), torch.zeros(2, 3), {str(tmp_path / "model.onnx")!r})
"""
    ended = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert ended.returncode == 128 + 15
    assert not list(tmp_path.iterdir())
