"""The functions behind the custom nodes, one by one, in every form."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from attnres_compile.exporters.node_types import DOMAIN
from attnres_compile.exporters.onnx_functions import FORMS, MIX, Form, function_proto
from attnres_compile.ops import depth_attention, factored, inter_block, merge, reference
from tests.exporters.onnx_material import EPS, F16, F32, check, normal, onnx, run, session, sources_of
from tests.tolerances import assert_close

# Numbers of sources and leading sizes: all ranks, no tokens at all, and more sources than a power of two.
COUNTS = [(1, ()), (1, (2, 3)), (2, (4,)), (3, (2, 3)), (3, (2, 1, 3)), (3, (0, 3)), (2, (3, 0)), (33, (2, 3))]

every_form = pytest.mark.parametrize("form", FORMS)
every_dtype = pytest.mark.parametrize("dtype", [F32, F16])


def call(
    name: str, inputs: list[Tensor], form: Form = "matmul", opset: int = 23, outputs: int = 1, **attributes: float
) -> list[Tensor]:
    """Run one custom node with its function, declared with unknown shapes."""
    types = {F32: onnx.TensorProto.FLOAT, F16: onnx.TensorProto.FLOAT16}
    info = onnx.helper.make_tensor_value_info
    formals = [info(f"x{i}", types[t.dtype], [None] * t.dim()) for i, t in enumerate(inputs)]
    node = onnx.helper.make_node(name, [f.name for f in formals], [f"y{i}" for i in range(outputs)], domain=DOMAIN)
    node.attribute.extend(onnx.helper.make_attribute(key, value) for key, value in attributes.items())
    results = [onnx.ValueInfoProto(name=output) for output in node.output]
    graph = onnx.helper.make_graph([node], "graph", formals, results)
    opsets = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid(DOMAIN, 1)]
    functions = [function_proto(name, opset, form)]
    proto = onnx.helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=10)
    inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True)
    return run(session(inferred), *inputs)


@every_form
@every_dtype
@pytest.mark.parametrize(("count", "leading"), COUNTS)
def test_depth_attention(count: int, leading: tuple[int, ...], dtype: torch.dtype, form: Form) -> None:
    sources = sources_of(count, *leading, 20, dtype=dtype)
    query, key_norm = normal(20), 1 + 0.3 * normal(20, seed=9)
    actual = call(f"DepthAttentionN{count}", [query, key_norm, *sources], form, eps=1e-3, scale=3.0)
    check(actual, [depth_attention(sources, query, key_norm, 1e-3, 3.0)])


@every_form
@every_dtype
@pytest.mark.parametrize("reads", [1, 4])
@pytest.mark.parametrize(("count", "leading"), COUNTS)
def test_inter_block(count: int, leading: tuple[int, ...], reads: int, dtype: torch.dtype, form: Form) -> None:
    blocks = sources_of(count, *leading, 20, dtype=dtype)
    queries, key_norms = normal(reads, 20), 1 + 0.3 * normal(reads, 20, seed=9)
    name, inputs = f"InterBlockN{count}S{reads}", [queries, key_norms, *blocks]
    o, m, l = inter_block(blocks, queries, key_norms, 1e-3)
    expected = [*(o / l.unsqueeze(-1)).unbind(), *(m + l.log()).unbind()]
    check(call(name, inputs, form, outputs=2 * reads, eps=1e-3), expected)


@every_form
@every_dtype
@pytest.mark.parametrize("leading", [(), (4,), (2, 3), (0, 3)])
def test_merge(leading: tuple[int, ...], dtype: torch.dtype, form: Form) -> None:
    o, z, one = normal(*leading, 20), normal(*leading, seed=2), torch.ones(leading)
    partial, query, key_norm = normal(*leading, 20, dtype=dtype, seed=4), normal(20, seed=5), normal(20, seed=6)
    actual = call("Merge", [o, z, partial, query, key_norm], form, eps=1e-3, scale=3.0)
    check(actual, [merge(o, z, one, partial, query, key_norm, 1e-3, 3.0)])


@every_form
@every_dtype
@pytest.mark.parametrize(("norm", "add"), [("RMSNorm", False), ("RMSNorm", True), ("LayerNorm", True)])
@pytest.mark.parametrize("leading", [(), (2, 3), (0, 3)])
def test_merge_norm(leading: tuple[int, ...], norm: str, add: bool, dtype: torch.dtype, form: Form) -> None:
    o, z, one = normal(*leading, 20), normal(*leading, seed=2), torch.ones(leading)
    terms = sources_of(2 if add else 1, *leading, 20, dtype=dtype)
    query, key_norm, weight = normal(20, seed=5), normal(20, seed=6), normal(20, seed=7)
    bias = normal(20, dtype=dtype, seed=8)
    inputs = [o, z, *terms, query, key_norm, weight, bias]
    name = f"{'Add' * add}Merge{norm}"
    actual = call(name, inputs, form, outputs=1 + add, eps=1e-3, norm_eps=1e-4, scale=3.0)
    total = sum(terms[1:], terms[0])
    h = reference.merge(*(t.double() for t in (o, z, one, total, query, key_norm)), eps=1e-3, scale=3.0)
    h = factored.normalise(h, weight.double(), bias.double(), 1e-4, norm == "LayerNorm").to(dtype)
    check(actual, [total, h] if add else [h])


@every_form
def test_a_nan_stays_in_its_token(form: Form) -> None:
    sources = [s * torch.ones(1, 3, 8) for s in (1.0, -1.0, 0.0)]
    sources[2][0, 1] = torch.nan
    query = 1e4 * torch.ones(8)  # the weights underflow
    (actual,) = call("DepthAttentionN3", [query, torch.ones(8), *sources], form, eps=EPS, scale=3.0)
    assert actual[0, 1].isnan().all()
    assert_close(actual[0, ::2], torch.full((2, 8), 3.0))


@every_form
@pytest.mark.parametrize("opset", [20, 25])
def test_other_opsets(opset: int, form: Form) -> None:
    sources, query, key_norm = sources_of(3, 2, 20), normal(20), 1 + 0.3 * normal(20, seed=9)
    actual = call("DepthAttentionN3", [query, key_norm, *sources], form, opset, eps=1e-3, scale=3.0)
    check(actual, [depth_attention(sources, query, key_norm, 1e-3, 3.0)])


@every_form
@pytest.mark.parametrize("count", [2, 3])
def test_stable_where_exponentials_overflow(form: Form, count: int) -> None:
    sources, query, ones = sources_of(count, 4, 20), 100 * normal(20), torch.ones(20)
    logits = torch.stack([reference.inter_block([v], query[None], None, eps=EPS)[1][0] for v in sources])
    assert logits.abs().max() > 89  # exp overflows fp32
    actual = call(f"DepthAttentionN{count}", [query, ones, *sources], form, eps=EPS, scale=1.0)
    check(actual, [reference.depth_attention(sources, query, None, eps=EPS)])


def test_the_unrolled_form() -> None:
    """What compilers fuse into one kernel."""
    kinds = Counter(node.op_type for node in function_proto("DepthAttentionN5", 23, "unrolled").node)
    assert not kinds.keys() & {"Concat", "Softmax", "Reshape", "MatMul", "RMSNormalization"}
    assert kinds["Exp"] == 5
    assert kinds["Max"] == 1


def test_the_tied_form() -> None:
    """A kernel is known by what it mixes: a product for each source, their sum, and two factors."""
    function = function_proto("DepthAttentionN5", 23, "tied")
    kinds = Counter(node.op_type for node in function.node)
    assert kinds == Counter(node.op_type for node in function_proto("DepthAttentionN5", 23, "unrolled").node) + Counter(
        {"Constant": 1, "Min": 1, "CastLike": 1, "Mul": 5, "Cast": 5}
    )
    assert sum(f"_{MIX}_" in node.name for node in function.node) == 5 + 1 + 2


def test_the_matmul_form() -> None:
    """Two multiplications for any number of reads, and no copy of a first phase's results but their split."""
    kinds = Counter(node.op_type for node in function_proto("InterBlockN5S7", 23).node)
    assert kinds["MatMul"] == 2
    assert kinds["Concat"] == 2  # the sources, and a shape
    assert kinds["Split"] == 2


# The rules that runtimes break on.


@every_form
@pytest.mark.parametrize(
    "name",
    [
        *("DepthAttentionN1", "DepthAttentionN2", "DepthAttentionN5", "InterBlockN3S2"),
        *("Merge", "MergeLayerNorm", "AddMergeRMSNorm", "AddMergeLayerNorm"),
    ],
)
def test_rules_for_names(name: str, form: Form) -> None:
    """TensorRT's parser binds a formal to a tensor of that name, and looks functions up by name alone."""
    function = function_proto(name, 23, form)
    names = {value for node in function.node for value in [*node.input, *node.output]}
    names |= {*function.input, *function.output}
    assert all(value.startswith(f"{DOMAIN}_{name}_") for value in names)
    assert all(node.name.startswith(f"{DOMAIN}_{name}_") for node in function.node)
    written = [value for node in function.node for value in node.output]
    assert len({*written, *function.input}) == len(written) + len(function.input)
    assert not onnx.defs.has(function.name)
    assert {*function.attribute} == {"plugin_namespace", "plugin_version"}
    assert all(value for node in function.node for value in node.input)


def test_one_name_for_each_arity() -> None:
    arities = {}
    for name in ("DepthAttentionN1", "DepthAttentionN11", "InterBlockN1S1", "InterBlockN11S1", "InterBlockN1S11"):
        function = function_proto(name, 23)
        assert function.name == name
        arities[len(function.input), len(function.output)] = name
    assert len(arities) == 5


@pytest.mark.parametrize(
    "name",
    [
        "DepthAttentionN",
        "DepthAttentionN0",
        "InterBlockN2",
        "InterBlockN2S0",
        "InterBlockNx",
        "Softmax",
        "Merge2",
        "AddMerge",
    ],
)
def test_unknown_function(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        function_proto(name, 23)
