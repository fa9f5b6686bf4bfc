"""The key norm of frozen reads becomes part of the query, and nothing else does."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from attnres_compile.passes._emit import STAMP
from attnres_compile.passes.base import run
from attnres_compile.passes.fold_key_norm import NAME, QUERIES, FoldKeyNorm
from attnres_compile.passes.fuse_neighbours import FuseNeighbours
from attnres_compile.passes.remove_dead import RemoveDead
from attnres_compile.passes.schedule_two_phase import ScheduleTwoPhase
from tests.passes.models import WIDTH
from tests.passes.reads import Graph, Plain, Reading, aten_row, check, count, graph, outcome, read, seeded, untouched
from tests.passes.tracing import listing, subject
from tests.tolerances import assert_close

READS = ("query", "key_norm")


def with_attributes(
    make: Callable[[], nn.Module], *, frozen: Sequence[str] = READS, dtype: torch.dtype = torch.float64
) -> Graph:
    """A graph whose reads are attributes, as ``transform`` of a graph module leaves them."""
    module, inputs = graph(seeded(make, dtype))
    placeholders = module.graph.find_nodes(op="placeholder")
    kept = []
    for node, value in zip(placeholders, inputs, strict=True):
        name = node.name.removeprefix("p_")
        if name not in READS:
            kept.append(value)
            continue
        module.register_parameter(name, nn.Parameter(value.detach(), requires_grad=name not in frozen))
        with module.graph.inserting_before(placeholders[-1].next):
            attribute = module.graph.get_attr(name)
        attribute.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(attribute)
        module.graph.erase_node(node)
    module.graph.set_codegen(fx.graph.CodeGen())
    module.recompile()
    return module, kept


def keys(module: fx.GraphModule) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in module.named_buffers() if name.startswith("_attnres_key")}


def two(m: Any, x: Tensor) -> list[Tensor]:
    blocks = [x, x.sin()]
    return [read(blocks, *m.row(1)), read([*blocks, x.cos()], *m.row(2)), read([x, x.tan()], *m.row(1))]


def test_listing() -> None:
    found = with_attributes(lambda: Reading(two))
    module = check(found, FoldKeyNorm(), RemoveDead())
    assert listing(module) == [
        "sin = sin(x)",
        "depth_attention = depth_attention([x, sin], 0.001, 2.0)",
        "cos = cos(x)",
        "depth_attention_1 = depth_attention([x, sin, cos], 0.001, 3.0)",
        "tan = tan(x)",
        "depth_attention_2 = depth_attention([x, tan], 0.001, 2.0)",
        "output = output([depth_attention, depth_attention_1, depth_attention_2])",
    ]
    reads = [node for node in module.graph.nodes if node.target in QUERIES]
    # reads of one row share the constant
    assert [node.args[1].target for node in reads] == ["_attnres_key_0", "_attnres_key_1", "_attnres_key_0"]
    assert [node.args[2] for node in reads] == [None] * 3
    query, key_norm = module.get_parameter("query"), module.get_parameter("key_norm")
    assert list(keys(module)) == ["_attnres_key_0", "_attnres_key_1"]
    for row, key in enumerate(keys(module).values(), 1):
        assert torch.equal(key, (query * key_norm)[row])
    for node in module.graph.find_nodes(op="get_attr"):
        assert node.meta[STAMP] == NAME
        assert node.meta["val"].shape == (WIDTH,)
    assert not {name for name in module.state_dict() if "_attnres_key" in name}


@pytest.mark.parametrize("sizes", [(1, 4), (2, 2, 1), (1, 1, 1, 1, 1)], ids=str)
def test_every_operator(sizes: tuple[int, ...]) -> None:
    found = with_attributes(lambda: Plain(sizes))
    module = check(found, ScheduleTwoPhase(), FuseNeighbours(), FoldKeyNorm(), RemoveDead())
    reads = [node for node in module.graph.nodes if node.target in QUERIES]
    assert count(module).keys() >= {"inter_block", "merge_norm"}
    for node in reads:
        at = QUERIES[node.target]
        assert node.args[at].op == "get_attr"
        assert node.args[at + 1] is None
    assert {node.target for node in module.graph.find_nodes(op="get_attr")} == keys(module).keys()


def test_merges_without_a_norm_after_them() -> None:
    def body(m: Any, x: Tensor) -> list[Tensor]:
        blocks = [x, x.sin()]
        return [read([*blocks, x.cos()], *m.row(0)), read(blocks, *m.row(2))]

    module = check(with_attributes(lambda: Reading(body)), ScheduleTwoPhase(), FoldKeyNorm(), RemoveDead())
    assert count(module) == {"inter_block": 1, "merge": 2}
    merges = [node for node in module.graph.nodes if str(node.target) == "attnres_compile.merge.default"]
    # a first read has no vectors of its own; the stacked rows of the first phase are another constant
    assert [getattr(node.args[4], "target", None) for node in merges] == ["_attnres_key_1", None]
    assert keys(module)["_attnres_key_0"].shape == (2, WIDTH)


@pytest.mark.parametrize("frozen", [(), ("query",), ("key_norm",)], ids=str)
def test_what_is_trained_is_left(frozen: tuple[str, ...]) -> None:
    untouched(with_attributes(lambda: Plain((1, 4)), frozen=frozen), FoldKeyNorm())


def test_inputs_and_computed_vectors_are_left() -> None:
    def computed(m: Any, x: Tensor) -> list[Tensor]:
        return [read([x, x.sin()], m.row(0)[0].exp(), m.row(0)[1])]

    def given(m: Any, x: Tensor) -> list[Tensor]:
        return [read([x, x.sin()], x[0, 0], m.row(0)[1])]

    untouched(graph(seeded(lambda: Plain((1, 4)))), FoldKeyNorm())
    for body in (computed, given):
        untouched(with_attributes(lambda body=body: Reading(body)), FoldKeyNorm())  # type: ignore[misc]


def test_without_key_norm_there_is_nothing_to_fold() -> None:
    def body(m: Any, x: Tensor) -> list[Tensor]:
        return [read([x, x.sin()], aten_row(m.query, 0), None)]

    untouched(with_attributes(lambda: Reading(body)), FoldKeyNorm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_product_is_not_rounded_to_half_precision(dtype: torch.dtype) -> None:
    found = with_attributes(lambda: Reading(two), dtype=dtype)
    expected = outcome(found)
    run((FoldKeyNorm(),), subject(found[0]))
    assert {key.dtype for key in keys(found[0]).values()} == {torch.float32}
    for name, value in outcome(found).items():
        assert torch.equal(value, expected[name]), name


def test_names_that_are_taken() -> None:
    found = with_attributes(lambda: Reading(two))
    found[0].register_buffer("_attnres_key_0", torch.zeros(1))
    expected = found[0](*found[1])
    run((FoldKeyNorm(),), subject(found[0]))
    assert list(keys(found[0])) == ["_attnres_key_0", "_attnres_key_1", "_attnres_key_2"]
    assert torch.equal(keys(found[0])["_attnres_key_0"], torch.zeros(1))
    for a, e in zip(found[0](*found[1]), expected, strict=True):
        assert_close(a, e)
