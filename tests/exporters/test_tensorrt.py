"""`export_tensorrt`: engines for GPUs that need not be there, one kernel a read, or no file."""

import copy
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

import attnres_compile as ac
from attnres_compile.errors import ExportError, MissingDependencyError, OptionError
from attnres_compile.exporters import TensorRTExport, export_tensorrt, tensorrt_build

pytest.importorskip("onnx")


def loadable() -> bool:
    try:
        tensorrt_build.package("tensorrt_rtx", None)
    except MissingDependencyError:
        return False
    return True


builds = pytest.mark.skipif(not loadable(), reason="tensorrt_rtx cannot be imported")

TARGETS = (80, 86, 89, 120)
TOKENS = {"input_ids": {0: (1, 2, 4), 1: (1, 64, 256)}}
PIXELS = {"pixel_values": {0: Dim("batch", min=1, max=8)}}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def language_model(layers: int = 4, width: int = 192) -> nn.Module:
    """SmolLM2's shapes, smaller: heads of 64 features in groups of three, four blocks of two sublayers."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 192,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def vision_model() -> nn.Module:
    config = ViTConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=2, intermediate_size=128, image_size=32, patch_size=8
    )
    return ViTModel(config, add_pooling_layer=False).eval()


def transformed(model: nn.Module, inputs: Any, blocks: int = 4) -> nn.Module:
    """With random queries."""
    model = ac.transform(model, inputs, num_blocks=blocks, verify="off")
    for name, parameter in model.named_parameters():
        if name.startswith("attnres") and name.endswith("query"):
            nn.init.normal_(parameter, std=0.1)
    return model


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(512, (2, 16))}


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def export(model: nn.Module, inputs: Any, path: Path, precision: str = "fp32", **options: Any) -> TensorRTExport:
    shapes, output = (
        (TOKENS, attrgetter("logits")) if "input_ids" in inputs else (PIXELS, attrgetter("last_hidden_state"))
    )
    result = export_tensorrt(
        model, inputs, path, precision=precision, dynamic_shapes=shapes, output=output, echo=None, **options
    )
    assert path.stat().st_size > 1000
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    print(result)
    return result


def check_reads(result: TensorRTExport, count: int) -> None:
    assert len(result.reads) == count
    for read in result.reads:
        assert len(read.mixing) == 1, read
        # At most each source's statistics are computed elsewhere, for several reads at once.
        assert len(read.statistics) <= read.sources + 1, read
    assert len({read.mixing for read in result.reads}) == count
    assert result.stored <= result.sources
    assert result.compute_capabilities == TARGETS


# Engines.


@builds
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_language_model_and_its_original(precision: str, tmp_path: Path) -> None:
    model, inputs = language_model(), tokens()
    path = tmp_path / "model.engine"
    original = export(copy.deepcopy(model), inputs, path, precision)
    result = export(transformed(model, inputs), inputs, path, precision, compute_capabilities=TARGETS)
    check_reads(result, 8)
    # In fp32 the residual add and the next norm are in the kernel of the read.
    assert result.kernels <= original.kernels + len(result.reads)
    assert original.reads == ()
    assert result.profile == {"input_ids": ((1, 2, 4), (1, 64, 256))}
    assert result.runtime.startswith("tensorrt_rtx ")
    dtypes = {parameter.dtype for parameter in model.parameters()}
    assert dtypes == {torch.float32}


@builds
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_language_model(precision: str, tmp_path: Path) -> None:
    inputs = tokens()
    result = export(transformed(language_model(), inputs), inputs, tmp_path / "model.engine", precision)
    check_reads(result, 8)
    assert [name for name, _ in result.parity] == ([] if precision == "bf16" else ["output"])


@builds
def test_vision_model(tmp_path: Path) -> None:
    inputs, path, model = pixels(), tmp_path / "model.engine", vision_model()
    original = export(copy.deepcopy(model), inputs, path)
    result = export(transformed(model, inputs), inputs, path, compute_capabilities=TARGETS)
    check_reads(result, 8)
    assert result.kernels <= original.kernels + len(result.reads)
    assert result.profile == {"pixel_values": ((1, 2, 8), (3, 3, 3), (32, 32, 32), (32, 32, 32))}


@builds
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_vision_model_in_half_precision(precision: str, tmp_path: Path) -> None:
    inputs, model = pixels(), vision_model()
    original = export(copy.deepcopy(model), inputs, tmp_path / "model.engine", precision)
    result = export(transformed(model, inputs), inputs, tmp_path / "model.engine", precision)
    check_reads(result, 8)
    assert result.kernels <= original.kernels + len(result.reads)


@builds
@pytest.mark.slow
def test_deep_model_in_fp16(tmp_path: Path) -> None:
    model, inputs = language_model(layers=12, width=768), tokens()
    original = export(copy.deepcopy(model), inputs, tmp_path / "model.engine", "fp16")
    result = export(transformed(model, inputs, blocks=8), inputs, tmp_path / "model.engine", "fp16")
    check_reads(result, 24)
    assert result.kernels <= original.kernels + len(result.reads)


# What is refused.


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        result: Tensor = self.linear(x) if y is None else self.linear(x + y)
        return result


def refused(error: type[Exception], message: str, path: Path, *inputs: Tensor, **options: Any) -> None:
    before = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    with pytest.raises(error, match=message):
        export_tensorrt(Small(), inputs or (torch.randn(2, 8),), path, echo=None, **options)
    assert (sorted(path.parent.iterdir()) if path.parent.is_dir() else []) == before


@pytest.mark.parametrize(
    "runtime, targets, extra",
    [(None, None, "tensorrt-rtx"), ("tensorrt", None, "tensorrt"), (None, (86,), "tensorrt-rtx")],
)
def test_missing_package(
    runtime: str | None, targets: Any, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, name, None)
    message = rf"tensorrt\S* cannot be imported .*pip install 'attnres-compile\[{extra}\]'"
    options = {"runtime": runtime, "compute_capabilities": targets}
    refused(MissingDependencyError, message, tmp_path / "m.engine", **options)


def test_wrong_precision(tmp_path: Path) -> None:
    refused(OptionError, "precision is one of fp32, fp16, bf16; got 'fp8'", tmp_path / "m.engine", precision="fp8")


def test_wrong_runtime(tmp_path: Path) -> None:
    refused(OptionError, "runtime is 'tensorrt' or 'tensorrt_rtx', got 'trt'", tmp_path / "m.engine", runtime="trt")


@builds
@pytest.mark.parametrize("targets", [(90,), (86, 8), ()])
def test_wrong_compute_capability(targets: tuple[int, ...], tmp_path: Path) -> None:
    message = r"compute_capabilities: tensorrt_rtx \S+ has 75, 80, .*; got \["
    refused(OptionError, message, tmp_path / "m.engine", compute_capabilities=targets)


@builds
@pytest.mark.parametrize(
    "shapes, message",
    [
        ({"z": {0: (1, 2, 4)}}, "names 'z'; the inputs are x"),
        ({"x": {2: (1, 2, 4)}}, r"dynamic_shapes\['x'\], axis 2: the example has 2 axes"),
        ({"x": {0: "batch"}}, "give .smallest, usual, largest. or a Dim with min and max; got batch"),
        ({"x": {0: Dim("batch")}}, "give .smallest, usual, largest. or a Dim with min and max"),
        ({"x": {0: (4, 2, 8)}}, r"1 <= smallest <= usual, example <= largest; got \(4, 2, 8\) and an example of 2"),
        ({"x": {0: (3, 4, 8)}}, "an example of 2"),
        ({"x": [{0: (1, 2, 4)}, {0: (1, 2, 4)}]}, "has axes of 2 tensors; there are 1"),
    ],
)
def test_contradictory_shapes(shapes: Any, message: str, tmp_path: Path) -> None:
    refused(OptionError, message, tmp_path / "m.engine", dynamic_shapes=shapes)


@builds
def test_axes_that_the_model_makes_equal(tmp_path: Path) -> None:
    shapes = {"x": {0: (1, 2, 4)}, "y": {0: (1, 2, 8)}}
    x = torch.randn(2, 8)
    refused(OptionError, "makes axes of x and y equal", tmp_path / "m.engine", x, x, dynamic_shapes=shapes)


@builds
def test_axis_that_is_static_in_the_model(tmp_path: Path) -> None:
    refused(ExportError, "cannot capture the model", tmp_path / "m.engine", dynamic_shapes={"x": {1: (4, 8, 16)}})


@builds
def test_plugins_need_tensorrt(tmp_path: Path) -> None:
    options = {"runtime": "tensorrt_rtx", "plugins": True}
    refused(OptionError, "tensorrt_rtx takes no plugins", tmp_path / "m.engine", **options)


@builds
def test_unwritable_path(tmp_path: Path) -> None:
    refused(ExportError, "cannot write .*: No such file", tmp_path / "no" / "m.engine")


@builds
def test_what_tensorrt_does_not_know(tmp_path: Path) -> None:
    class Determinant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.linalg.det(x)[:, None, None]

    with pytest.raises(ExportError) as caught:
        export_tensorrt(Determinant(), torch.randn(2, 3, 3), tmp_path / "m.engine", echo=None)
    message = str(caught.value)
    assert message.startswith("tensorrt_rtx's parser rejects the model: ")
    assert f"{__file__}:" in message
    assert "torch.linalg.det" in message
    assert not list(tmp_path.iterdir())
