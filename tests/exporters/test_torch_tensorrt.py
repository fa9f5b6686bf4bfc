"""The adapter for torch_tensorrt, by the calls that torch_tensorrt makes."""

import json
import sys

import pytest

from attnres_compile.errors import MissingDependencyError
from attnres_compile.exporters.torch_tensorrt import register_converters
from attnres_compile.ops import triton as kernels
from tests.exporters import tensorrt_stand_in
from tests.exporters.onnx_material import EPS, WIDTH
from tests.triton_process import run


@pytest.mark.skipif(not kernels.available(), reason=kernels.reason())
@pytest.mark.skipif(not tensorrt_stand_in.found(), reason="tensorrt-cu13-bindings is not installed")
def test_every_read_becomes_a_plugin() -> None:
    found = json.loads(run("-m", "tests.exporters.torch_tensorrt_stand_in").splitlines()[-1])
    assert found["passes"] == 1
    assert found["operators"] == ["attnres_compile.depth_attention.default"]
    assert found["error"] < 1e-4
    kinds = [f"attnres_compile::DepthAttentionN{n}" for n in (2, 2, 3, 3, 3, 4)]
    assert [layer["plugin"] for layer in found["layers"]] == kinds
    first = found["layers"][0]
    assert first["name"].startswith("[attnres_compile.depth_attention.default]-[")
    assert first["attributes"] == {"eps": EPS, "scale": 2.0}
    # The query, ones for the missing weight of the keys, and the sources.
    assert first["inputs"][:2] == [f"({WIDTH},) torch.float32", f"({WIDTH},) float32"]
    assert first["inputs"][2] == "embedding"
    assert len(set(first["inputs"])) == 4


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    with pytest.raises(MissingDependencyError, match=r"need torch_tensorrt, .* pip install torch_tensorrt"):
        register_converters()
