"""The function behind a read for TensorRT: the same numbers as the equations, and the rules of its parser."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnres_compile.ops import reference
from tests.tolerances import assert_close

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from attnres_compile.exporters import onnx_functions  # noqa: E402
from attnres_compile.exporters.onnx_functions import DOMAIN  # noqa: E402
from attnres_compile.exporters.tensorrt_form import MIX, Read, function_proto, set_form  # noqa: E402

EPS = 1e-6
TYPES = {torch.float32: onnx.TensorProto.FLOAT, torch.float16: onnx.TensorProto.FLOAT16}


def model(n: int, d: int, dtype: torch.dtype, function: Any) -> Any:
    """One read of `n` inputs of the graph."""
    names = ["query", "key_norm", *(f"v{i}" for i in range(n))]
    shapes = [[d], [d], *[["batch", "length", d]] * n]
    kind = TYPES[dtype]
    inputs = [onnx.helper.make_tensor_value_info(name, kind, shape) for name, shape in zip(names, shapes, strict=True)]
    output = onnx.helper.make_tensor_value_info("h", kind, ["batch", "length", d])
    node = onnx.helper.make_node(function.name, names, ["h"], "read", domain=DOMAIN, eps=EPS, scale=float(n))
    graph = onnx.helper.make_graph([node], "graph", inputs, [output])
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(DOMAIN, 1)]
    return onnx.helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=10)


def run(proto: Any, *inputs: Tensor) -> Tensor:
    onnx.checker.check_model(proto, full_check=True)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return torch.from_numpy(session.run(None, {n: t.numpy() for n, t in zip(names, inputs, strict=True)})[0])


@pytest.mark.parametrize("n, dtype", [(1, torch.float32), (2, torch.float16), (9, torch.float16), (33, torch.float32)])
def test_equals_reference(n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    d = 48
    query, key_norm = (torch.randn(d) / 3).to(dtype), (1 + torch.randn(d) / 4).to(dtype)
    sources = [(torch.randn(2, 5, d) * (1 + i % 3)).to(dtype) for i in range(n)]
    actual = run(model(n, d, dtype, function_proto(n, 23)), query, key_norm, *sources)
    wide = [t.double() for t in (query, key_norm, *sources)]
    expected = n * reference.depth_attention(wide[2:], wide[0], wide[1], eps=EPS)
    assert_close(actual, expected)


def test_zero_queries_give_the_sum() -> None:
    sources = [torch.randn(1, 3, 16) for _ in range(4)]
    actual = run(model(4, 16, torch.float32, function_proto(4, 23)), torch.zeros(16), torch.ones(16), *sources)
    assert_close(actual, torch.stack(sources).sum(0))


def test_hostile_values() -> None:
    # Logits far apart, whose weights underflow, and a NaN that stays in its token.
    query, sources = 1e4 * torch.ones(8), [s * torch.ones(1, 3, 8) for s in (1.0, -1.0, 0.0)]
    sources[2][0, 1] = torch.nan
    actual = run(model(3, 8, torch.float32, function_proto(3, 23)), query, torch.ones(8), *sources)
    assert actual[0, 1].isnan().all()
    assert_close(actual[0, ::2], torch.full((2, 8), 3.0))


def test_names_and_interface() -> None:
    function, usual = function_proto(3, 21), onnx_functions.function_proto("DepthAttentionN3", 21)
    assert (function.domain, function.name) == (usual.domain, usual.name)
    assert list(function.attribute) == ["plugin_namespace", "plugin_version"]
    assert {a.name: round(a.f, 9) for a in function.attribute_proto} == {"eps": 1e-6, "scale": 1.0}
    assert [len(function.input), len(function.output)] == [5, 1]
    names = [*function.input, *(name for node in function.node for name in (*node.output, node.name))]
    assert all(name.startswith("attnres_compile_DepthAttentionN3_") for name in names)
    # A kernel is known by what it mixes: a product for each source, their sum, and two factors.
    assert sum(f"_{MIX}_" in node.name for node in function.node) == 3 + 1 + 2
    assert not {"Concat", "Softmax"} & {node.op_type for node in function.node}
    assert [(o.domain, o.version) for o in function.opset_import] == [("", 21)]


def test_set_form(tmp_path: Path) -> None:
    usual = model(2, 8, torch.float32, onnx_functions.function_proto("DepthAttentionN2", 23))
    usual.graph.node[0].metadata_props.add(
        key="pkg.torch.onnx.stack_trace", value='File "m.py", line 3, in f\n    x + y'
    )
    onnx.save(usual, tmp_path / "usual.onnx")
    form = set_form(tmp_path / "usual.onnx", tmp_path / "form.onnx")
    assert form.reads == (Read("read", "DepthAttentionN2", (None, None)),)
    assert form.places == {"read": "m.py:3: x + y"}
    assert form.inputs["v1"] == ("batch", "length", 8)
    (function,) = onnx.load(tmp_path / "form.onnx").functions
    assert [node.op_type for node in function.node] == [node.op_type for node in function_proto(2, 23).node]
    inputs = torch.randn(8), torch.ones(8), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    assert_close(run(onnx.load(tmp_path / "form.onnx"), *inputs), run(usual, *inputs))
