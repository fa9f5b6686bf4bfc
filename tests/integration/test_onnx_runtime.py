"""Transformed models of several kinds in plain ONNX Runtime: random queries, two sizes, custom nodes with functions."""

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
NAMES = ["llama", "gpt2", "gemma2", "modernbert", "whisper", "vit"]


@pytest.mark.parametrize("name", NAMES)
def test_runtime_equals_pytorch(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = case.build(layers=2)
    first, second = (zoo_check.inputs_of(case, model, torch.float32, shape).kwargs for shape in zoo_check.shapes(case))
    model = ac.transform(model, first, num_blocks=2, verify="off")
    zoo_check.randomise(zoo_check.reads_of(model))
    path = tmp_path / "model.onnx"
    result = ac.export_onnx(model, first, path, dynamic_shapes=case.dynamic, output=case.output, echo=None)
    print(name, result.parity, result.nodes)

    proto = onnx.load(path)
    nodes = [node.op_type for node in proto.graph.node if node.domain == DOMAIN]
    assert {function.name for function in proto.functions if function.domain == DOMAIN} == set(nodes)
    assert {kind: nodes.count(kind) for kind in sorted(set(nodes))} == result.nodes

    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    for inputs in (first, second):
        feeds: dict[str, Any] = {key: inputs[key].numpy() for key in case.dynamic}
        actual = torch.from_numpy(session.run(None, feeds)[0])
        with torch.no_grad():
            expected = case.output(model(**inputs))
        assert_close(actual, expected, name)
        worst = float((actual - expected).abs().max())
        print(f"{worst:.1e}")
        assert worst <= 1e-4
