"""Plugins through NVIDIA's own `tensorrt.plugin`: what a builder is given, and the kernels' numbers."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.errors import ExportError, MissingDependencyError, OptionError
from attnres_compile.exporters import tensorrt, tensorrt_build, tensorrt_plugins
from attnres_compile.exporters.tensorrt_build import Engine, Kernel
from attnres_compile.exporters.tensorrt_plugins import without_hidden
from attnres_compile.ops import triton as kernels
from tests.exporters import tensorrt_stand_in
from tests.exporters.onnx_material import onnx
from tests.triton_process import run

importable = pytest.mark.skipif(not kernels.available(), reason=kernels.reason())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    cache = str(tmp_path_factory.mktemp("triton"))
    lines = run("-W", "error", "-m", "tests.exporters.tensorrt_aot", TRITON_CACHE_DIR=cache).splitlines()
    return [json.loads(line) for line in lines]


@importable
@pytest.mark.skipif(not tensorrt_stand_in.found(), reason="tensorrt-cu13-bindings is not installed")
def test_ahead_of_time(built: list[dict[str, Any]]) -> None:
    names, *plugins = built
    norms = [f"{add}Merge{norm}" for norm in ("RMSNorm", "LayerNorm") for add in ("", "Add")]
    first = ["DepthAttentionN2", "InterBlockN2S6", "Merge", "DepthAttentionN9", "InterBlockN9S6", *norms]
    assert names["first"] == first
    assert names["then"] == ["DepthAttentionN33", "InterBlockN33S6"]
    assert len(plugins) == 17
    for plugin in plugins:
        print(plugin)
        # Inputs, then one integer, then outputs.
        pointers = ["u64"] * plugin["inputs"], ["u64"] * len(plugin["types"])
        assert plugin["parameters"] == [*pointers[0], "u32", *pointers[1]]
        assert plugin["extra"] == [49]
        assert plugin["entry"] == plugin["kernel"]
        assert plugin["target"] == ["sm_80"]
        # What drivers of CUDA 13.0 take.
        assert float(plugin["version"][0]) <= 9.0
        assert not plugin["paths"]
        # More would have to be asked for at the launch.
        assert plugin["shared"] <= 48 * 1024
        for capability, found in plugin["assembled"].items():
            assert found["rc"] == 0, (plugin["plugin"], capability)
            assert found["spills"] == 0, (plugin["plugin"], capability, found)
            assert 0 < found["registers"] * plugin["threads"] <= 65536


@importable
@pytest.mark.skipif(not tensorrt_stand_in.found(), reason="tensorrt-cu13-bindings is not installed")
def test_shapes_types_and_grids(built: list[dict[str, Any]]) -> None:
    found = {plugin["plugin"]: plugin for plugin in built[1:] if plugin["d"] == 1024}
    assert found["DepthAttentionN9"]["types"] == ["HALF"]
    assert found["DepthAttentionN9"]["sizes"] == [["7?", "7?", 1024]]
    assert found["InterBlockN9S6"]["types"] == ["FLOAT"] * 12
    assert found["InterBlockN9S6"]["sizes"] == [["7?", "7?", 1024]] * 6 + [["7?", "7?"]] * 6
    assert found["InterBlockN9S6"]["grid"] == 49 * 2
    assert found["Merge"]["types"] == found["MergeRMSNorm"]["types"] == ["HALF"]
    assert found["AddMergeLayerNorm"]["types"] == ["HALF"] * 2
    assert found["AddMergeLayerNorm"]["sizes"] == [["7?", "7?", 1024]] * 2
    # The kernel's last argument is the last result.
    assert found["AddMergeLayerNorm"]["entry"] == "add_merge_norm"
    # A narrow row shares its program with others.
    narrow = next(plugin for plugin in built[1:] if plugin["plugin"] == "DepthAttentionN2")
    assert (narrow["grid"], narrow["threads"]) == (7, 32)


@importable
def test_numerics() -> None:
    file = "tests/exporters/tensorrt_numerics.py"
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", file, TRITON_INTERPRET="1")


PTX = """.visible .entry kernel(
\t.param .u64 .ptr .global .align 1 kernel_param_0,
\t.param .u32 kernel_param_1,
\t.param .u64 .ptr .global .align 1 kernel_param_2,
\t.param .u64 .ptr .global .align 1 kernel_param_3
)
.reqntid 128
{
\tld.param.b64 %rd1, [kernel_param_0];
}
"""


def test_hidden_parameters_are_removed() -> None:
    code = without_hidden(PTX, 2)
    assert re.findall(r"kernel_param_\d", code) == ["kernel_param_0", "kernel_param_1", "kernel_param_0"]
    assert code.startswith(PTX[: PTX.index(",\n\t.param .u64 .ptr .global .align 1 kernel_param_2")] + "\n)\n")


@pytest.mark.parametrize("count, ptx", [(3, PTX), (2, PTX.replace("_0]", "_3]")), (2, "no kernel")])
def test_other_parameters(count: int, ptx: str) -> None:
    with pytest.raises(ExportError, match=f"Triton compiled a kernel of {count} arguments"):
        without_hidden(ptx, count)


@importable
def test_missing_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingDependencyError, match=r"tensorrt.plugin, .*pip install 'attnres-compile\[tensorrt\]'"):
        tensorrt_plugins.register_plugins()


@importable
def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_plugins, "_tensorrt_plugin", lambda: None)
    for name in ("DepthAttentionN0", "InterBlockN3", "MergeNorm", "Relu"):
        with pytest.raises(OptionError, match=f"no plugin is called '{name}'; there are DepthAttentionN<n>"):
            tensorrt_plugins.register_plugins([name])


# Engines with plugins.


class Layer(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.linear = norm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).tanh()


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_one_plugin_for_each_read(norm: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed to the builder and to the registry; ONNX Runtime compares it with the model."""
    torch.manual_seed(0)
    inputs = torch.randn(2, 5, 16)
    # A layer is a sublayer here. The norm at the end is the ninth read.
    model = ac.transform(nn.Sequential(*(Layer(norm) for _ in range(8)), norm(16)), inputs, num_blocks=2, verify="off")
    for name, parameter in model.named_parameters():
        if name.endswith("query"):
            nn.init.normal_(parameter)
    registered, names = list[str](), list[str]()

    def build(trt: Any, file: Path, *_: Any) -> Engine:
        names.extend(node.name for node in onnx.load(file).graph.node if node.domain == "attnres_compile")
        plugins = tuple(Kernel(name, "plugin", (name,), (), ()) for name in names if "inter_block" not in name)
        return Engine(bytes(2000), plugins, 0)

    monkeypatch.setattr(
        tensorrt_build, "package", lambda *_: (SimpleNamespace(__name__="tensorrt", __version__="11"), ())
    )
    monkeypatch.setattr(tensorrt_build, "build", build)
    monkeypatch.setattr(tensorrt, "register_plugins", registered.extend)
    result = ac.export_tensorrt(model, inputs, tmp_path / "model.engine", plugins=True, echo=None)
    kind = norm.__name__
    # The first block's reads are plain; then a read without an add before it, and those with one.
    assert registered == [f"AddMerge{kind}", "DepthAttentionN2", "InterBlockN2S5", f"Merge{kind}"]
    assert [(read.plugin, read.sources) for read in result.reads] == [(True, 2)] * 3 + [(True, 3)] * 4
    ((_, difference),) = result.parity
    assert difference < 1e-4
