"""The exported file: custom nodes and their functions, equal to PyTorch in ONNX Runtime."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnres_compile.config import AttnResConfig
from attnres_compile.exporters import OnnxExport, export_onnx
from attnres_compile.exporters.node_types import DOMAIN
from attnres_compile.ops import inter_block, merge
from attnres_compile.passes.base import Subject
from attnres_compile.passes.base import run as run_passes
from attnres_compile.passes.fuse_neighbours import FuseNeighbours
from attnres_compile.passes.remove_dead import RemoveDead
from tests.exporters.onnx_material import (
    EPS,
    F16,
    F32,
    SHAPES,
    WIDTH,
    TwoPhase,
    check,
    normal,
    onnx,
    run,
    session,
    tokens,
)
from tests.tolerances import assert_close


@dataclass
class Exported:
    model: TwoPhase
    result: OnnxExport
    lines: list[str]
    proto: Any


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    model, lines = TwoPhase(), list[str]()
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    result = export_onnx(model, tokens(2, 5), path, echo=lines.append)
    return Exported(model, result, lines, onnx.load(path))


# The exported file.


@pytest.mark.parametrize("shape", SHAPES)
def test_file_equals_the_equations(exported: Exported, shape: tuple[int, int]) -> None:
    (actual,) = run(session(exported.result.path), tokens(*shape))
    expected = exported.model.by_reference(tokens(*shape))
    assert_close(actual, expected)
    assert (actual - expected).abs().max() <= 1e-4


def test_result_and_report(exported: Exported) -> None:
    result = exported.result
    assert [file.name for file in result.path.parent.iterdir()] == ["model.onnx"]
    assert result.nodes == {
        "DepthAttentionN4": 1,
        "InterBlockN1S1": 1,
        "InterBlockN2S3": 1,
        "InterBlockN3S1": 1,
        "Merge": 3,
    }
    assert result.functions == tuple(result.nodes)
    ((name, error),) = result.parity
    assert name == "output"
    assert 0 < error <= 1e-4 == result.atol
    assert exported.lines[0] == f"✓ output max |Δ| {error:.1e} (atol 0.0001)"
    assert len(exported.lines) == 2
    assert "DepthAttentionN4 ×1" in exported.lines[1]
    assert exported.model.training


def test_file_has_custom_nodes_and_their_functions(exported: Exported) -> None:
    proto = exported.proto
    custom = [node for node in proto.graph.node if node.domain == DOMAIN]
    assert Counter(node.op_type for node in custom) == exported.result.nodes
    assert {function.name for function in proto.functions} == set(exported.result.functions)
    assert {function.domain for function in proto.functions} == {DOMAIN}
    assert {entry.domain: entry.version for entry in proto.opset_import} == {"": 23, DOMAIN: 1}
    for node in custom:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert attributes.pop("plugin_namespace") == b"attnres_compile"
        assert attributes.pop("plugin_version") == b"1"
        function = next(f for f in proto.functions if f.name == node.op_type)
        assert set(attributes) == {a.name for a in function.attribute_proto}
        assert len(node.input) == len(function.input)
        assert all(node.input)
    assert onnx.helper.get_node_attr_value(next(n for n in custom if n.op_type == "DepthAttentionN4"), "scale") == 4.0


def test_axes_are_dynamic_and_named(exported: Exported) -> None:
    def dims(value: Any) -> list[Any]:
        return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]

    graph = exported.proto.graph
    assert [(value.name, dims(value)) for value in graph.input] == [("tokens", ["batch", "sequence"])]
    assert [(value.name, dims(value)) for value in graph.output] == [("output", ["batch", "sequence", WIDTH])]


def test_shapes_are_inferred_through_the_functions(exported: Exported) -> None:
    """Without the shapes that torch recorded, the functions' bodies alone give every rank."""
    stripped = onnx.ModelProto()
    stripped.CopyFrom(exported.proto)
    del stripped.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(stripped, check_type=True, strict_mode=True, data_prop=True)
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in inferred.graph.value_info}
    for node in (node for node in inferred.graph.node if node.domain == DOMAIN):
        reads = int(node.op_type.partition("S")[2] or 0)
        expected = [3] * reads + [2] * reads or [3]
        assert [ranks.get(name, 3) for name in node.output] == expected, node.op_type


def test_runtime_inlines_every_function(exported: Exported, tmp_path: Path) -> None:
    optimised = tmp_path / "optimised.onnx"
    session(exported.result.path, optimized_model_filepath=str(optimised))
    proto = onnx.load(optimised)
    assert len(proto.graph.node) > 50
    assert not [node for node in proto.graph.node if node.domain == DOMAIN]
    assert len(proto.functions) == 0


def test_checker_accepts_the_file(exported: Exported) -> None:
    onnx.checker.check_model(str(exported.result.path), full_check=True)


def test_names_in_functions_meet_no_other_name(exported: Exported) -> None:
    graph = exported.proto.graph
    outer = {value.name for value in [*graph.input, *graph.initializer]}
    outer |= {name for node in graph.node for name in [*node.input, *node.output]}
    seen: set[str] = set()
    for function in exported.proto.functions:
        names = {name for node in function.node for name in [*node.input, *node.output]}
        names |= {*function.input, *function.output}
        assert all(name.startswith(f"{DOMAIN}_{function.name}_") for name in names)
        assert not names & outer
        assert not names & seen
        seen |= names
        assert not onnx.defs.has(function.name)


def test_a_first_phase_is_taken_apart_without_copies(exported: Exported) -> None:
    """Its node gives every read's results: nothing stacks, splits or squeezes them."""
    kinds = {node.op_type for node in exported.proto.graph.node}
    assert not kinds & {"Split", "Squeeze", "Slice", "Concat", "Unsqueeze", "Div", "Log"}


def test_states_that_come_from_elsewhere(tmp_path: Path) -> None:
    """A first phase that is not taken apart row by row, and a state that none of the operators made."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.other = nn.Parameter(normal(2, WIDTH)), nn.Parameter(normal(WIDTH, seed=3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            o, m, l = inter_block([x, x * 2], self.query, None, EPS)
            first = merge(o[1], m[1], l[1], x + 1, self.query[1], None, EPS, 3.0)
            own = merge(x, x[..., 0], x[..., 0].exp(), x + 1, self.other, None, EPS, 3.0)
            return first, own, merge(x, x[..., 0], x[..., 0].exp(), None, None, None, EPS, 2.0)

    x = normal(2, 3, WIDTH)
    result = export_onnx(Odd(), x, tmp_path / "odd.onnx", echo=None)
    assert result.nodes == {"InterBlockN2S2": 1, "Merge": 2}
    check(run(session(result.path), x), list(Odd()(x)))


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_reads_with_their_neighbours(norm: type[nn.Module], dtype: torch.dtype, tmp_path: Path) -> None:
    """The first read of a block, the second, and one after an add; the norm is wanted in the stream's dtype."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.norm = nn.Parameter(normal(3, WIDTH)), norm(WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            o, m, l = (rows.unbind(0) for rows in inter_block([x, x * 2], self.query, None, EPS))
            first = self.norm(merge(o[0], m[0], l[0], None, None, None, EPS, 2.0).to(x.dtype))
            second = self.norm(merge(o[1], m[1], l[1], first, self.query[1], None, EPS, 3.0))
            total = first + second
            third = self.norm(merge(o[2], m[2], l[2], total, self.query[2], None, EPS, 3.0))
            return first, second, total, third

    model, x = Fused().to(dtype), normal(2, 3, WIDTH, dtype=dtype)
    program = torch.export.export(model, (x,))
    run_passes((FuseNeighbours(), RemoveDead()), Subject(program.graph_module, AttnResConfig()))
    result = export_onnx(program, None, tmp_path / "fused.onnx", echo=None, atol=None)
    kind = norm.__name__
    assert result.nodes == {f"AddMerge{kind}": 1, "InterBlockN2S3": 1, f"Merge{kind}": 1}
    check(run(session(result.path), x), [t.detach() for t in model(x)])
