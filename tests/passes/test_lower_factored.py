"""Every operator becomes PyTorch's own: which, from how many tokens on, and the same numbers at any size."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from attnres_compile.ops._library import IMPLEMENTATIONS
from attnres_compile.passes._emit import STAMP
from attnres_compile.passes.base import run
from attnres_compile.passes.lower_factored import NAME, LowerFactored
from tests.passes.models import WIDTH
from tests.passes.reads import EPS, OPS, count
from tests.passes.tracing import example, operations, subject
from tests.tolerances import assert_close

Calls = Callable[..., Any]
Mode = Literal["fake", "symbolic"]
OPTIONS = (EPS, 1e-5, 3.0, "rms")


def tensors(batch: int = 2, length: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """A gradient, three sources, and two rows of a query, a key norm, a weight and a bias each."""
    states = [example(batch, length, WIDTH, seed=seed) for seed in range(4)]
    vectors = [example(2, WIDTH, seed=seed) for seed in range(4, 8)]
    return [tensor.to(dtype) for tensor in (*states, *vectors)]


def depth_attention(g: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, k: Tensor, w: Tensor, c: Tensor) -> Any:
    return OPS.depth_attention.default([a, b, p], q[0], k[0], EPS, 3.0)


def depth_attention_backward(
    g: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, k: Tensor, w: Tensor, c: Tensor
) -> Any:
    return OPS.depth_attention_backward.default(g, [a, b, p], q[0], None, EPS, 3.0)


def inter_block(g: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, k: Tensor, w: Tensor, c: Tensor) -> Any:
    return OPS.inter_block.default([a, b], q, k, EPS)


def inter_block_backward(g: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, k: Tensor, w: Tensor, c: Tensor) -> Any:
    grads = torch.stack([g, p]), torch.stack([g, p]).sum(-1), torch.stack([p, g]).sum(-1)
    return OPS.inter_block_backward.default(*grads, [a, b], q, k, EPS)


def accumulate(g: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, k: Tensor, w: Tensor, c: Tensor) -> Any:
    return OPS.accumulate.default(a, b)


def merge(g: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, k: Tensor, w: Tensor, c: Tensor) -> Any:
    m, l = a.mean(-1), b.square().sum(-1)
    first = OPS.merge.default(a, m, l, None, None, None, EPS, 2.0)
    return first, OPS.merge.default(a, m, l, p, q[0], k[0], EPS, 3.0)


def merge_backward(g: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, k: Tensor, w: Tensor, c: Tensor) -> Any:
    return OPS.merge_backward.default(g, a, a.mean(-1), b.square().sum(-1), p, q[0], k[0], EPS, 3.0)


def merge_norm(g: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, k: Tensor, w: Tensor, c: Tensor) -> Any:
    statistics = [a, b], a, a.mean(-1), b.square().sum(-1)
    first = OPS.merge_norm.default(*statistics, None, q[0], None, None, None, *OPTIONS[:-1], "layer")
    return first, OPS.merge_norm.default(*statistics, p, q[0], k[0], w[0], c[0], *OPTIONS)


def add_merge_norm(g: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, k: Tensor, w: Tensor, c: Tensor) -> Any:
    statistics = [a, b], a, a.mean(-1), b.square().sum(-1)
    return OPS.add_merge_norm.default(p, g, *statistics, q[0], k[0], w[0], c[0], *OPTIONS)


def add_merge_norm_backward(
    g: Tensor, a: Tensor, b: Tensor, p: Tensor, q: Tensor, k: Tensor, w: Tensor, c: Tensor
) -> Any:
    statistics = p, a, a.mean(-1), b.square().sum(-1), q[0], k[0], w[0]
    sums = OPS.add_merge_norm_backward.default(g, g, *statistics, *OPTIONS)
    return sums, OPS.add_merge_norm_backward.default(None, g, *statistics, *OPTIONS[:-1], "layer")


CALLS: list[Calls] = [
    accumulate,
    depth_attention,
    depth_attention_backward,
    inter_block,
    inter_block_backward,
    merge,
    merge_backward,
    merge_norm,
    add_merge_norm,
    add_merge_norm_backward,
]


def traced(call: Calls, values: list[Tensor], mode: Mode = "fake") -> fx.GraphModule:
    return make_fx(call, tracing_mode=mode)(*values)


def lowered(module: fx.GraphModule, **options: Any) -> fx.GraphModule:
    run((LowerFactored(**options),), subject(module))
    return module


def assert_equal(actual: Any, expected: Any) -> None:
    ours, theirs = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(ours) == len(theirs)
    for i, (a, e) in enumerate(zip(ours, theirs, strict=True)):
        assert a.dtype == e.dtype
        assert_close(a, e, f"result {i}")


def test_every_operator_is_here() -> None:
    assert {target.name().rpartition(":")[2] for target in IMPLEMENTATIONS} == {call.__name__ for call in CALLS}


@pytest.mark.parametrize("decompositions", [None, select_decomp_table()], ids=["as they are", "inductor's"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_results(call: Calls, decompositions: Any) -> None:
    values = tensors()
    module = traced(call, values)
    assert count(module).keys() == {call.__name__}
    old = set(module.graph.nodes)
    lowered(module, decompositions=decompositions)
    assert count(module) == {}
    assert_equal(module(*values), call(*values))
    new = [node for node in module.graph.nodes if node not in old]
    assert new
    assert all(node.meta[STAMP] == NAME for node in new)
    assert not LowerFactored(decompositions=decompositions)(subject(module))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_dtypes_of_half_precision(call: Calls) -> None:
    values = tensors(dtype=torch.bfloat16)
    module = traced(call, values)
    before = pytree.tree_map_only(Tensor, lambda t: t.dtype, module(*values))
    assert pytree.tree_map_only(Tensor, lambda t: t.dtype, lowered(module)(*values)) == before


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_dynamic_tokens(call: Calls) -> None:
    # of no size that anything else has, or they would share a symbol
    module = lowered(traced(call, tensors(5, 7), "symbolic"))
    assert count(module) == {}
    for batch, length in ((5, 7), (2, 3), (3, 11)):
        values = tensors(batch, length)
        assert_equal(module(*values), call(*values))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_threshold(call: Calls, mode: Mode) -> None:
    # the first phase of two reads has two rows of statistics per token
    tokens = 12 if call.__name__ == "inter_block" else 6
    module = traced(call, tensors(), mode)
    text = str(module.graph)
    assert not LowerFactored(tokens - 1)(subject(module))
    assert str(module.graph) == text
    assert LowerFactored(tokens)(subject(module))
    assert count(module) == {}


def test_only_the_small_ones() -> None:
    def both(a: Tensor, b: Tensor, q: Tensor) -> Any:
        large = OPS.depth_attention.default([a, b], q, None, EPS, 2.0)
        return large, OPS.depth_attention.default([a[:1, :1], b[:1, :1]], q, None, EPS, 2.0)

    values = [*tensors()[:2], tensors()[4][0]]
    module = lowered(traced(both, values), tokens=1)
    assert count(module) == {"depth_attention": 1}
    assert_equal(module(*values), both(*values))


def test_norms_of_shared_blocks_are_there_once() -> None:
    def reads(a: Tensor, b: Tensor, c: Tensor, q: Tensor) -> Any:
        first = OPS.inter_block.default([a, b], q, None, EPS)
        return first, OPS.inter_block.default([a, b, c], q, None, EPS)

    values = [*tensors()[:3], tensors()[4]]
    module = lowered(traced(reads, values))
    norms = [name for name in operations(module) if "vector_norm" in name]
    assert len(norms) == 3
    assert_equal(module(*values), reads(*values))


def test_numbers_keep_operators_apart() -> None:
    """Two operators on the same operands share what is equal, and only that."""

    def reads(a: Tensor, b: Tensor, q: Tensor) -> Any:
        return [OPS.depth_attention.default([a, b], q, None, eps, scale) for eps, scale in ((1e-3, 2.0), (1.0, 2.0))]

    values = [*tensors()[:2], tensors()[4][0]]
    module = lowered(traced(reads, values))
    assert_equal(module(*values), reads(*values))
    first, second = module(*values)
    assert not torch.allclose(first, second)


def test_place_in_the_source_is_kept() -> None:
    module = traced(depth_attention, tensors())
    (node,) = [n for n in module.graph.nodes if n.target in IMPLEMENTATIONS]
    node.meta |= {"stack_trace": "the line", "nn_module_stack": {"layer": ("layer", "Layer")}}
    lowered(module)
    new = [n for n in module.graph.nodes if STAMP in n.meta]
    assert {n.meta["stack_trace"] for n in new} == {"the line"}
    assert all(n.meta["nn_module_stack"] == {"layer": ("layer", "Layer")} for n in new)
