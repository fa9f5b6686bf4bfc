"""What an ONNX file says of its reads, and which kernels a builder's log gives them."""

from pathlib import Path

import pytest

onnx = pytest.importorskip("onnx")

from attnres_compile.exporters.node_types import DOMAIN  # noqa: E402
from attnres_compile.exporters.onnx_functions import function_proto  # noqa: E402
from attnres_compile.exporters.tensorrt_build import Kernel, Tensor  # noqa: E402
from attnres_compile.exporters.tensorrt_reads import Read, ReadKernels, contents, read_kernels  # noqa: E402


def test_contents(tmp_path: Path) -> None:
    names = ["query", "key_norm", "v0", "v1"]
    shapes = [[8], [8], *[["batch", "length", 8]] * 2]
    kind = onnx.TensorProto.FLOAT
    inputs = [onnx.helper.make_tensor_value_info(name, kind, shape) for name, shape in zip(names, shapes, strict=True)]
    outputs = [onnx.helper.make_tensor_value_info("h", kind, ["batch", "length", 8])]
    made = onnx.helper.make_node("Neg", ["v1"], ["negative"], "made")
    read = onnx.helper.make_node("DepthAttentionN2", [*names[:3], "negative"], ["h"], "read", domain=DOMAIN)
    read.metadata_props.add(key="pkg.torch.onnx.stack_trace", value='File "m.py", line 3, in f\n    x + y')
    graph = onnx.helper.make_graph([made, read], "graph", inputs, outputs)
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(DOMAIN, 1)]
    functions = [function_proto("DepthAttentionN2", 23, "tied")]
    onnx.save(onnx.helper.make_model(graph, functions=functions, opset_imports=opsets), tmp_path / "model.onnx")
    found = contents(tmp_path / "model.onnx")
    assert found.reads == (Read("read", "DepthAttentionN2", (None, "made")),)
    assert found.places == {"read": "m.py:3: x + y"}
    assert found.inputs["v1"] == ("batch", "length", 8)


def test_read_kernels() -> None:
    wide, logit, out = (
        Tensor("b0", (-1, -1, 8), "Half"),
        Tensor("s0", (-1, -1, 1), "Float"),
        Tensor("h", (-1, 8), "Half"),
    )
    prefix = "attnres_compile_DepthAttentionN2"
    first, second = "read (DepthAttentionN2)", "next (DepthAttentionN2)"
    statistics = Kernel("a", "kgen", (f"{prefix}_div_7 | {first}", f"{prefix}_div_7 | {second}"), (), (wide, logit))
    mixing = Kernel("b", "kgen", (f"{prefix}_mix_9 | {first}",), (wide, logit), (out,))
    other = Kernel("c", "gemm", ("node_linear",), (out,), ())
    plugin = Kernel("d", "plugin", ("taken",), (), ())
    reads = [Read("read", "DepthAttentionN2", (None, None)), Read("taken", "DepthAttentionN3", (None,) * 3)]
    found, stored = read_kernels(reads, [statistics, mixing, other, plugin])
    assert found == (ReadKernels("read", 2, ("b",), ("a",)), ReadKernels("taken", 3, (), (), plugin=True))
    assert stored == 1  # b0; a logit is not wide
