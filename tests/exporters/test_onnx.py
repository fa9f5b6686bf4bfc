"""`export_onnx`: ways to call it, and what its files are in ONNX Runtime."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attnres_compile.errors import InputError, OptionError
from attnres_compile.exporters import export_onnx
from attnres_compile.exporters.node_types import DOMAIN
from attnres_compile.exporters.onnx_functions import Form, function_proto
from attnres_compile.ops import depth_attention
from tests.exporters.onnx_material import (
    EPS,
    F16,
    VOCABULARY,
    WIDTH,
    Small,
    TwoPhase,
    check,
    normal,
    onnx,
    run,
    session,
    tokens,
)
from tests.tolerances import TOLERANCE, assert_close


def test_half_precision(tmp_path: Path) -> None:
    model = TwoPhase((1, 2)).to(F16)
    with torch.no_grad():
        model.embedding.weight.mul_(0.5)
    result = export_onnx(model, tokens(2, 5), tmp_path / "half.onnx", atol=2e-2, echo=None)
    assert result.nodes == {"DepthAttentionN3": 1, "InterBlockN2S2": 1, "Merge": 1}
    (actual,) = run(session(result.path), tokens(3, 7))
    assert actual.dtype == F16
    expected = model.float().by_reference(tokens(3, 7))
    error = (actual.float() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[F16]


def test_one_source_many_sources_and_no_key_norm(tmp_path: Path) -> None:
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Parameter(normal(2, WIDTH))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            one = depth_attention([x], self.query[0], None, EPS, 1.0)
            return one, depth_attention([x * (i + 1) + i for i in range(33)], self.query[1], None, EPS, 33.0)

    x = normal(2, 3, WIDTH)
    result = export_onnx(Ends(), (x,), tmp_path / "ends.onnx", atol=1e-2, echo=None)
    assert result.nodes == {"DepthAttentionN1": 1, "DepthAttentionN33": 1}
    one, many = run(session(result.path), x)
    assert_close(one, x)
    assert_close(many, Ends()(x)[1])


def test_attention_with_a_learned_bias(tmp_path: Path) -> None:
    """PyTorch lays its result out in other ways when it captures it and when it translates it."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(normal(1, 2, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
            mask = torch.zeros(x.shape[1], x.shape[1]) + self.bias
            mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
            mixed = mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)
            return depth_attention([x, mixed], x.new_ones(x.shape[-1]), None, EPS, 1.0)

    model, axes = Attention(), {0: Dim("batch"), 1: Dim("length")}
    result = export_onnx(model, (normal(2, 5, WIDTH),), tmp_path / "a.onnx", dynamic_shapes={"x": axes}, echo=None)
    x = normal(3, 7, WIDTH)
    assert_close(run(session(result.path), x)[0], model(x))


def test_attention_is_an_output(tmp_path: Path) -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    x = normal(2, 2, 5, WIDTH)
    result = export_onnx(Attention(), (x,), tmp_path / "attention.onnx", echo=None)
    assert_close(run(session(result.path), x)[0], Attention()(x))


def test_outputs_by_name_and_a_batch_of_one(tmp_path: Path) -> None:
    model = Small().eval()
    result = export_onnx(model, {"x": normal(1, 3, WIDTH)}, tmp_path / "small.onnx", echo=None)
    assert [name for name, _ in result.parity] == ["hidden", "branch_0"]
    runtime = session(result.path)
    assert [value.name for value in runtime.get_outputs()] == ["hidden", "branch_0"]
    assert runtime.get_inputs()[0].shape == ["batch", 3, WIDTH]
    x = normal(4, 3, WIDTH)
    check(run(runtime, x), [model(x)["hidden"], model(x)["branch"][0]])
    assert not model.training


@pytest.mark.parametrize("opset", [20, 25])
def test_opsets_and_chosen_output(tmp_path: Path, opset: int) -> None:
    def pick(result: dict[str, Any]) -> Any:
        return result["hidden"]

    model = Small()
    shapes = {"x": {0: Dim("rows"), 1: "columns"}}
    result = export_onnx(
        model,
        normal(2, 3, WIDTH),
        tmp_path / "small.onnx",
        dynamic_shapes=shapes,
        opset_version=opset,
        output=pick,
        echo=None,
    )
    proto = onnx.load(result.path)
    assert {entry.domain: entry.version for entry in proto.opset_import} == {"": opset, DOMAIN: 1}
    assert [entry.version for function in proto.functions for entry in function.opset_import] == [opset]
    runtime = session(result.path)
    assert runtime.get_inputs()[0].shape == ["rows", "columns", WIDTH]
    x = normal(5, 1, WIDTH)
    check(run(runtime, x), [model(x)["hidden"]])


def test_large_weights_lie_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 0)
    x = normal(2, 3, WIDTH)
    result = export_onnx(Small(), x, tmp_path / "large.onnx", echo=None)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["large.onnx", "large.onnx.data"]
    check(run(session(result.path), x)[:1], [Small()(x)["hidden"]])


def test_exported_program(tmp_path: Path) -> None:
    x = normal(2, 3, WIDTH)
    program = torch.export.export(Small().eval(), (), {"x": x}, dynamic_shapes={"x": {0: Dim.DYNAMIC}})
    result = export_onnx(program, None, tmp_path / "program.onnx", echo=None)
    assert result.nodes == {"DepthAttentionN2": 1}
    y = normal(5, 3, WIDTH)
    check(run(session(result.path), y)[:1], [Small()(y)["hidden"]])
    with pytest.raises(OptionError, match="fixed"):
        export_onnx(program, None, tmp_path / "other.onnx", dynamic_shapes={"x": {0: Dim.DYNAMIC}})
    with pytest.raises(InputError, match="fixed"):
        export_onnx(program, None, tmp_path / "other.onnx", output=lambda result: result["hidden"])
    assert [file.name for file in tmp_path.iterdir()] == ["program.onnx"]


def test_one_phase_of_an_exported_program(tmp_path: Path) -> None:
    model, x = TwoPhase((2, 2)).eval(), tokens(2, 5)
    program = torch.export.export(model, (x,), dynamic_shapes={"tokens": {0: Dim.DYNAMIC}})
    before = str(program.graph)
    result = export_onnx(program, None, tmp_path / "model.onnx", target="tensorrt", echo=None)
    assert result.nodes == {"DepthAttentionN2": 2, "DepthAttentionN3": 2}
    assert str(program.graph) == before
    check(run(session(result.path), tokens(3, 5)), [model.by_reference(tokens(3, 5))])


def test_hugging_face_model(tmp_path: Path) -> None:
    """Keyword inputs in another order than the parameters, a cache that is on, and rotary embeddings that broadcast."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=VOCABULARY,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).train()
    ids = tokens(2, 7)
    inputs = transformers.BatchEncoding({"attention_mask": torch.ones_like(ids), "input_ids": ids})
    result = export_onnx(model, inputs, tmp_path / "llama.onnx", echo=None)
    assert [name for name, _ in result.parity] == ["logits"]
    assert model.training
    runtime = session(result.path)
    assert [value.name for value in runtime.get_inputs()] == ["input_ids", "attention_mask"]
    ids, mask = tokens(3, 11), torch.ones(3, 11, dtype=torch.int64)
    mask[1, :4] = 0
    (logits,) = run(runtime, ids, mask)
    with torch.no_grad():
        expected = model.eval()(input_ids=ids, attention_mask=mask).logits
    real = mask.bool()
    assert_close(logits[real], expected[real])


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({}, "matmul"),
        ({"target": "tensorrt"}, "tied"),
        ({"target": "tensorrt", "body": "stacked"}, "stacked"),
        ({"body": "tied"}, "tied"),
    ],
)
def test_targets_and_bodies(tmp_path: Path, options: dict[str, Any], form: Form) -> None:
    model = TwoPhase((2, 2))
    result = export_onnx(model, tokens(2, 5), tmp_path / "model.onnx", echo=None, **options)
    proto = onnx.load(result.path)
    two_phase = options.get("target") != "tensorrt"
    assert ("Merge" in result.nodes) == two_phase
    assert sum(result.nodes.values()) == (5 if two_phase else 4), result.nodes
    for function in proto.functions:
        assert list(function.node) == list(function_proto(function.name, 23, form).node)
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    assert metadata["attnres_compile.target"] == options.get("target", "onnxruntime")
    assert metadata["attnres_compile.body"] == form
    assert json.loads(metadata["attnres_compile.nodes"]) == result.nodes
    assert metadata["attnres_compile.version"] == version("attnres-compile")
    assert "attnres_compile.chains" not in metadata
    check(run(session(result.path), tokens(3, 9)), [model.by_reference(tokens(3, 9))])


def test_bfloat16_is_checked_but_not_run(tmp_path: Path) -> None:
    lines: list[str] = []
    result = export_onnx(TwoPhase((1, 2)).bfloat16(), tokens(2, 5), tmp_path / "half.onnx", echo=lines.append)
    assert lines[0].startswith("– parity not run: ONNX Runtime has no bfloat16 MatMul on the CPU")
    assert (result.parity, result.atol) == ((), None)
    proto = onnx.load(result.path)
    assert {tensor.data_type for tensor in proto.graph.initializer if len(tensor.dims) == 2} == {
        onnx.TensorProto.BFLOAT16
    }
    onnx.checker.check_model(proto, full_check=True)
