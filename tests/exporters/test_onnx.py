"""`export_onnx`: one file with custom nodes and their functions, equal to PyTorch in ONNX Runtime, or no file."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attnres_compile.errors import ExportError, InputError, MissingDependencyError, OptionError
from attnres_compile.exporters import OnnxExport, export_onnx
from attnres_compile.ops import depth_attention, inter_block, merge, reference
from tests.tolerances import TOLERANCE, assert_close

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from attnres_compile.exporters import onnx_functions  # noqa: E402
from attnres_compile.exporters.onnx_functions import DOMAIN, function_proto  # noqa: E402

OPS = torch.ops.attnres_compile
EPS, WIDTH, VOCABULARY = 1e-6, 24, 31
F32, F16 = torch.float32, torch.float16
SHAPES = [(2, 5), (1, 1), (3, 9)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class TwoPhase(nn.Module):
    """Block AttnRes as the library's graphs compute it: phase 1 when a block opens, phase 2 at each read."""

    def __init__(self, blocks: tuple[int, ...] = (2, 3, 1), *, key_norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = blocks
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.sublayers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(sum(blocks)))
        self.query = nn.Parameter(torch.randn(sum(blocks), WIDTH))
        self.key_norm = nn.Parameter(1 + 0.3 * torch.randn(sum(blocks), WIDTH)) if key_norm else None
        self.calls = 0

    def rows(self, index: int | slice) -> tuple[Tensor, Tensor | None]:
        return self.query[index], None if self.key_norm is None else self.key_norm[index]

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        hidden = source = self.embedding(tokens)
        closed, row = [source], 0
        for size in self.blocks:
            first = row == 0
            reads = slice(row - (not first), row + size - 1)
            statistics = []
            if reads.start < reads.stop:
                o, m, l = inter_block(closed, *self.rows(reads), EPS)
                statistics = list(zip(o.unbind(0), m.unbind(0), l.unbind(0), strict=True))
            if not first:
                hidden = merge(*statistics.pop(0), None, None, None, EPS, float(len(closed))).to(source.dtype)
            partial = self.sublayers[row](hidden)
            for read in statistics:
                hidden = merge(*read, partial, *self.rows(row), EPS, float(len(closed) + 1))
                row += 1
                partial = partial + self.sublayers[row](hidden)
            closed.append(partial)
            row += 1
        return depth_attention(closed, *self.rows(row - 1), EPS, float(len(closed)))

    def by_reference(self, tokens: Tensor) -> Tensor:
        """The same from the paper's equations: another path to the numbers."""
        with torch.no_grad():
            return reference.block_attnres(
                self.embedding(tokens),
                [layer for layer in self.sublayers if isinstance(layer, nn.Linear)],
                self.query,
                self.key_norm,
                self.blocks,
                eps=EPS,
                preserve=True,
            )


class Small(nn.Module):
    """One read of two sources."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.query = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> dict[str, Any]:
        branch = self.linear(x)
        return {"hidden": depth_attention([x, branch], self.query, None, EPS, 2.0), "branch": (branch, None)}


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(batch * 100 + length))


def session(model: Any, **options: Any) -> Any:
    """An ONNX Runtime session of a path or a ModelProto, without any library of custom operators."""
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    for name, value in options.items():
        setattr(settings, name, value)
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, settings, providers=["CPUExecutionProvider"])


def run(runtime: Any, *inputs: Tensor) -> list[Tensor]:
    names = [value.name for value in runtime.get_inputs()]
    feeds = {name: tensor.detach().numpy() for name, tensor in zip(names, inputs, strict=True)}
    return [torch.from_numpy(value) for value in runtime.run(None, feeds)]


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
        "InterBlockN1": 1,
        "InterBlockN2": 1,
        "InterBlockN3": 1,
        "Merge": 3,
        "MergeFirst": 2,
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
        expected = [4, 3, 3] if node.op_type.startswith("InterBlock") else [3]
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


# The functions on their own.

# Numbers of sources and leading sizes: all ranks, no tokens at all, and more sources than a power of two.
COUNTS = [(1, ()), (1, (2, 3)), (2, (4,)), (3, (2, 3)), (3, (2, 1, 3)), (3, (0, 3)), (2, (3, 0)), (33, (2, 3))]


def call(name: str, inputs: list[Tensor], outputs: int = 1, **attributes: float) -> list[Tensor]:
    """Run one custom node with its function, declared with unknown shapes."""
    types = {F32: onnx.TensorProto.FLOAT, F16: onnx.TensorProto.FLOAT16}
    info = onnx.helper.make_tensor_value_info
    formals = [info(f"x{i}", types[t.dtype], [None] * t.dim()) for i, t in enumerate(inputs)]
    node = onnx.helper.make_node(name, [f.name for f in formals], [f"y{i}" for i in range(outputs)], domain=DOMAIN)
    node.attribute.extend(onnx.helper.make_attribute(key, value) for key, value in attributes.items())
    results = [onnx.ValueInfoProto(name=output) for output in node.output]
    graph = onnx.helper.make_graph([node], "graph", formals, results)
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(DOMAIN, 1)]
    proto = onnx.helper.make_model(graph, functions=[function_proto(name, 23)], opset_imports=opsets, ir_version=10)
    inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True)
    return run(session(inferred), *inputs)


def normal(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sources_of(count: int, *shape: int, dtype: torch.dtype = F32) -> list[Tensor]:
    return [normal(*shape, dtype=dtype, seed=i + 1) * (1 + i % 3) for i in range(count)]


def check(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert_close(a, e)


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize(("count", "leading"), COUNTS)
def test_depth_attention_function(count: int, leading: tuple[int, ...], dtype: torch.dtype) -> None:
    sources = sources_of(count, *leading, 20, dtype=dtype)
    query, key_norm = normal(20), 1 + 0.3 * normal(20, seed=9)
    actual = call(f"DepthAttentionN{count}", [query, key_norm, *sources], eps=1e-3, scale=3.0)
    check(actual, [depth_attention(sources, query, key_norm, 1e-3, 3.0)])


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("reads", [1, 4])
@pytest.mark.parametrize(("count", "leading"), COUNTS)
def test_inter_block_function(count: int, leading: tuple[int, ...], reads: int, dtype: torch.dtype) -> None:
    blocks = sources_of(count, *leading, 20, dtype=dtype)
    queries, key_norms = normal(reads, 20), 1 + 0.3 * normal(reads, 20, seed=9)
    actual = call(f"InterBlockN{count}", [queries, key_norms, *blocks], 3, eps=1e-3)
    check(actual, list(inter_block(blocks, queries, key_norms, 1e-3)))


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("leading", [(), (4,), (2, 3), (0, 3)])
def test_merge_functions(leading: tuple[int, ...], dtype: torch.dtype) -> None:
    o, m, l = normal(*leading, 20), normal(*leading, seed=2), 1 + normal(*leading, seed=3).abs()
    partial, query, key_norm = normal(*leading, 20, dtype=dtype, seed=4), normal(20, seed=5), normal(20, seed=6)
    actual = call("Merge", [o, m, l, partial, query, key_norm], eps=1e-3, scale=3.0)
    check(actual, [merge(o, m, l, partial, query, key_norm, 1e-3, 3.0)])
    check(call("MergeFirst", [o, l], scale=3.0), [merge(o, m, l, None, None, None, 1e-3, 3.0)])


def test_functions_are_stable_where_exponentials_overflow() -> None:
    sources, query, ones = sources_of(3, 4, 20), 100 * normal(20), torch.ones(20)
    logits = torch.stack([reference.inter_block([v], query[None], None, eps=EPS)[1][0] for v in sources])
    assert logits.abs().max() > 89  # exp overflows fp32
    actual = call("DepthAttentionN3", [query, ones, *sources], eps=EPS, scale=1.0)
    check(actual, [reference.depth_attention(sources, query, None, eps=EPS)])


def test_depth_attention_is_unrolled() -> None:
    """The form that compilers fuse into one kernel."""
    kinds = Counter(node.op_type for node in function_proto("DepthAttentionN5", 23).node)
    assert not kinds.keys() & {"Concat", "Softmax", "Unsqueeze", "Reshape", "MatMul"}
    assert kinds["Exp"] == 5
    assert kinds["Max"] == 1


@pytest.mark.parametrize("name", ["DepthAttentionN", "DepthAttentionN0", "InterBlockNx", "Softmax", "Merge2"])
def test_unknown_function(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        function_proto(name, 23)


# Ways to call the exporter.


def test_half_precision(tmp_path: Path) -> None:
    model = TwoPhase((1, 2)).to(F16)
    with torch.no_grad():
        model.embedding.weight.mul_(0.5)
    result = export_onnx(model, tokens(2, 5), tmp_path / "half.onnx", atol=2e-2, echo=None)
    assert result.nodes == {"DepthAttentionN3": 1, "InterBlockN2": 1, "Merge": 1, "MergeFirst": 1}
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


# Failures leave no file.


def test_no_file_when_the_numbers_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(name: str, opset: int) -> Any:
        function = function_proto(name, opset)
        for node in function.node:
            node.op_type = "Abs" if node.op_type == "Exp" else node.op_type
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
        (InputError, "needs example_inputs", lambda: export_onnx(Small(), None, path)),
        (InputError, "missing a required argument: 'x'", lambda: export_onnx(Small(), {"y": x}, path)),
        (ExportError, r"\.float\(\)", lambda: export_onnx(Small().double(), x.double(), path)),
        (ExportError, "leave it out", lambda: export_onnx(Small(), x, path, dynamic_shapes={"x": {2: "width"}})),
    ]
    for error, message, export in cases:
        with pytest.raises(error, match=message):
            export()
    assert not list(tmp_path.iterdir())
