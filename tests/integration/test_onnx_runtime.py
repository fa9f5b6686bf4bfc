"""Transformed models of many kinds in plain ONNX Runtime: random queries, two sizes, custom nodes with functions."""

from pathlib import Path
from typing import Any

import pytest
import torch

import attnres_compile as ac
from tests import zoo_check
from tests.tolerances import assert_close
from tests.zoo import CASES

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

DOMAIN = "attnres_compile"
# A decoder, an encoder-decoder and a vision model; the others take longer than they tell.
DEFAULT = ["llama", "whisper", "vit"]
OTHERS = [
    "gpt2", "gemma2", "gemma3", "modernbert", "qwen3", "mistral", "phi3", "gpt_neox", "falcon", "cohere", "opt",
    "granite", "olmo2", "t5", "dinov2", "siglip_vision", "clip", "torch_encoder", "nanogpt",
]  # fmt: skip


@pytest.mark.parametrize("name", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_runtime_equals_pytorch(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model: Any = case.build(layers=2)
    first, second = (zoo_check.inputs_of(case, model, torch.float32, shape).kwargs for shape in zoo_check.shapes(case))
    model = ac.transform(model, first, num_blocks=2, verify="off")
    zoo_check.randomise(zoo_check.reads_of(model))
    path = tmp_path / "model.onnx"
    result = ac.export_onnx(model, first, path, dynamic_shapes=case.dynamic, output=case.output, echo=None)

    onnx.checker.check_model(str(path), full_check=True)
    proto = onnx.load(path)
    nodes = [node.op_type for node in proto.graph.node if node.domain == DOMAIN]
    assert {function.name for function in proto.functions if function.domain == DOMAIN} == set(nodes)
    assert {kind: nodes.count(kind) for kind in sorted(set(nodes))} == result.nodes
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    assert metadata["attnres_compile.model"] == model.attnres_report.model

    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    for inputs in (first, second):
        feeds: dict[str, Any] = {key: inputs[key].numpy() for key in case.dynamic}
        actual = torch.from_numpy(session.run(None, feeds)[0])
        with torch.no_grad():
            expected = case.output(model(**inputs))
        assert_close(actual, expected, name)
        assert float((actual - expected).abs().max()) <= 1e-4
