"""Plain reads become both phases: which of them, from which vectors, and the same numbers as before."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from attnres_compile.passes._emit import STAMP
from attnres_compile.passes.base import run
from attnres_compile.passes.schedule_two_phase import NAME, ScheduleTwoPhase
from tests.passes.models import WIDTH
from tests.passes.reads import (
    EPS,
    OPS,
    SIZES,
    Body,
    Plain,
    Reading,
    aten_row,
    check,
    count,
    graph,
    read,
    seeded,
    untouched,
)
from tests.passes.tracing import example, listing, subject
from tests.tolerances import assert_close


def scheduled(body: Body) -> fx.GraphModule:
    return check(graph(seeded(lambda: Reading(body))), ScheduleTwoPhase())


def left(body: Body) -> None:
    untouched(graph(seeded(lambda: Reading(body))), ScheduleTwoPhase())


def phases(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="call_function", target=OPS.inter_block.default))


def test_listing() -> None:
    def body(m: Any, x: Tensor) -> Sequence[Tensor]:
        y = x.sin()
        h1 = read([x, y], *m.row(0))
        p1 = h1.cos()
        h2 = read([x, y, p1], *m.row(1))
        return [read([x, y, p1 + h2], *m.row(2))]

    found = graph(seeded(lambda: Reading(body)))
    assert listing(found[0]) == [
        "sin = sin(x)",
        "select = select.int(0, 0)",
        "select_1 = select.int(0, 0)",
        "depth_attention = depth_attention([x, sin], select, select_1, 0.001, 2.0)",
        "cos = cos(depth_attention)",
        "select_2 = select.int(0, 1)",
        "select_3 = select.int(0, 1)",
        "depth_attention_1 = depth_attention([x, sin, cos], select_2, select_3, 0.001, 3.0)",
        "add = add.Tensor(cos, depth_attention_1)",
        "select_4 = select.int(0, 2)",
        "select_5 = select.int(0, 2)",
        "depth_attention_2 = depth_attention([x, sin, add], select_4, select_5, 0.001, 3.0)",
        "output = output([depth_attention_2])",
    ]
    module = check(found, ScheduleTwoPhase())
    lines = [line for line in listing(module) if "getitem(" not in line and "unbind" not in line]
    assert [line for line in lines if "select.int(" not in line] == [
        "sin = sin(x)",
        "slice_tensor = slice.Tensor(0, 0, 3)",
        "slice_tensor_1 = slice.Tensor(0, 0, 3)",
        "inter_block_default = inter_block([x, sin], slice_tensor, slice_tensor_1, 0.001)",
        "merge_default = merge(getitem_3, getitem_4, getitem_5, 0.001, 2.0)",
        "cos = cos(merge_default)",
        "merge_default_1 = merge(getitem_6, getitem_7, getitem_8, cos, select_2, select_3, 0.001, 3.0)",
        "add = add.Tensor(cos, merge_default_1)",
        "depth_attention_2 = merge(getitem_9, getitem_10, getitem_11, add, select_4, select_5, 0.001, 3.0)",
        "output = output([depth_attention_2])",
    ]


PHASES: dict[tuple[int, ...], dict[str, int]] = {
    # pairs, and the last read alone
    (1, 1, 1, 1, 1): {"inter_block": 2, "merge": 4, "depth_attention": 1},
    # the reads inside the first block share one source; that at its end is the first over two
    (2, 2, 1): {"depth_attention": 2, "inter_block": 1, "merge": 3},
    (3, 2): {"depth_attention": 2, "inter_block": 1, "merge": 3},
    (1, 3, 1): {"inter_block": 1, "merge": 4, "depth_attention": 1},
    (1, 4): {"inter_block": 1, "merge": 5},
}


@pytest.mark.parametrize("key_norm", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_groups_of_blocks(sizes: tuple[int, ...], key_norm: bool) -> None:
    found = graph(seeded(lambda: Plain(sizes, key_norm=key_norm)))
    if len(sizes) == 1:
        untouched(found, ScheduleTwoPhase())
    else:
        assert count(check(found, ScheduleTwoPhase())) == PHASES[sizes]


def test_first_read_without_a_partial_sum() -> None:
    def body(m: Any, x: Tensor) -> Sequence[Tensor]:
        blocks = [x, x.sin()]
        return [read(blocks, *m.row(0)), read([*blocks, x.cos()], *m.row(1))]

    module = scheduled(body)
    first, second = module.graph.find_nodes(op="call_function", target=OPS.merge.default)
    assert first.args[3:] == (None, None, None, EPS, 2.0)
    assert [getattr(arg, "name", arg) for arg in second.args[3:]] == ["cos", "select_2", "select_3", EPS, 3.0]


def test_group_that_begins_with_a_partial_sum() -> None:
    def body(m: Any, x: Tensor) -> Sequence[Tensor]:
        blocks = [x, x.sin()]
        return [read([*blocks, x.cos()], *m.row(0)), read([*blocks, x.tan()], *m.row(1)), read(blocks, *m.row(2))]

    module = scheduled(body)
    assert count(module) == {"inter_block": 1, "merge": 3}
    assert [n.name for n in phases(module)[0].args[0]] == ["x", "sin"]  # type: ignore[union-attr]


def test_the_same_read_twice() -> None:
    def body(m: Any, x: Tensor) -> Sequence[Tensor]:
        return [read([x, x.sin()], *m.row(0)), read([x, x.sin()], *m.row(0))]

    left(body)  # two sources of equal value are two sources

    def same(m: Any, x: Tensor) -> Sequence[Tensor]:
        blocks = [x, x.sin()]
        return [read(blocks, *m.row(0)), read(blocks, *m.row(0))]

    module = scheduled(same)
    assert count(module) == {"inter_block": 1, "merge": 2}
    assert str(phases(module)[0].args[1].target) == "aten.stack.default"  # type: ignore[union-attr]


@pytest.mark.parametrize("sources", [1, 2])
def test_one_shared_source_and_a_lone_read_are_left(sources: int) -> None:
    def body(m: Any, x: Tensor) -> Sequence[Tensor]:
        others = [x.sin(), x.cos(), x.tan()]
        if sources == 2:
            return [read([x, *others], *m.row(0))]
        return [read([x], *m.row(0)), read([x, others[0]], *m.row(1)), read([x, others[1]], *m.row(2))]

    left(body)


def test_another_eps_begins_another_group() -> None:
    def body(m: Any, x: Tensor) -> Sequence[Tensor]:
        blocks = [x, x.sin()]
        (q, k), eps = m.row(0), 1e-2
        return [read(blocks, q, k), OPS.depth_attention.default(blocks, q, k, eps, 2.0)]

    left(body)


def test_reads_without_key_norm_are_another_group() -> None:
    def body(m: Any, x: Tensor) -> Sequence[Tensor]:
        blocks = [x, x.sin()]
        plain = [read([*blocks, x.cos()], m.row(i)[0], None) for i in (2, 3)]
        return [read(blocks, *m.row(0)), read(blocks, *m.row(1)), *plain]

    module = scheduled(body)
    assert count(module) == {"inter_block": 2, "merge": 4}
    assert [n.args[2] is None for n in phases(module)] in ([True, False], [False, True])


@pytest.mark.parametrize(("rows", "target"), [((1, 2), "slice.Tensor"), ((2, 1), "stack"), ((0, 2), "stack")], ids=str)
def test_rows_in_a_row_are_a_slice(rows: tuple[int, int], target: str) -> None:
    def body(m: Any, x: Tensor) -> Sequence[Tensor]:
        return [read([x, x.sin(), x.cos()][: 2 + i], *m.row(row)) for i, row in enumerate(rows)]

    def shared(m: Any, x: Tensor) -> Sequence[Tensor]:
        blocks = [x, x.sin()]
        return [read(blocks, *m.row(rows[0])), read([*blocks, x.cos()], *m.row(rows[1]))]

    left(body)
    (phase,) = phases(scheduled(shared))
    assert [str(n.target).removeprefix("aten.").removesuffix(".default") for n in phase.args[1:3]] == [target] * 2  # type: ignore[union-attr]


def test_rows_of_two_matrices_and_columns_are_stacked() -> None:
    def two(m: Any, x: Tensor) -> Sequence[Tensor]:
        blocks, (q, k) = [x, x.sin()], m.row(1)
        return [read(blocks, aten_row(m.query, 0), k), read([*blocks, x.cos()], k, q)]

    def columns(m: Any, x: Tensor) -> Sequence[Tensor]:
        blocks, square = [x, x.sin()], m.query.T @ m.query
        vectors = [torch.ops.aten.select.int(square, 1, i) for i in range(2)]
        return [read(blocks, vectors[0], None), read([*blocks, x.cos()], vectors[1], None)]

    for body in (two, columns):
        (phase,) = phases(scheduled(body))
        assert str(phase.args[1].target) == "aten.stack.default"  # type: ignore[union-attr]


def test_later_rows_are_hoisted_and_computed_vectors_split_the_group() -> None:
    def body(computed: bool) -> Body:
        def run(m: Any, x: Tensor) -> Sequence[Tensor]:
            blocks = [x, x.sin()]
            first = read(blocks, *m.row(0))
            query, key_norm = m.row(1)
            return [first, read([*blocks, first.cos()], query.exp() if computed else query, key_norm)]

        return run

    module = scheduled(body(computed=False))
    (phase,) = phases(module)
    selected = [n for n in module.graph.nodes if str(n.target) == "aten.select.int"]
    assert all(n < phase for n in selected if n.args[2] == 1)
    left(body(computed=True))


def test_attributes_are_hoisted() -> None:
    """Symbolic graphs get a parameter where they need it first."""
    x, first, second = example(2, 3, WIDTH).double(), *example(2, WIDTH, seed=1).double()
    base, inputs = graph(seeded(lambda: Reading(lambda m, x: [x.sin()])), x)
    base.register_buffer("first", first)
    base.register_buffer("second", second)
    g, sin = base.graph, next(n for n in base.graph.nodes if n.op == "call_function")
    source = sin.args[0]
    mode = sin.meta["val"].fake_mode
    with g.inserting_before(g.output_node()):
        for name, sources in (("first", [source, sin]), ("second", [source, sin])):
            vector = g.get_attr(name)
            vector.meta["val"] = mode.from_tensor(base.get_buffer(name), static_shapes=True)
            node = g.call_function(OPS.depth_attention.default, (sources, vector, None, EPS, 2.0))
            node.meta["val"] = sin.meta["val"]
            g.output_node().update_arg(0, (*g.output_node().args[0], node))  # type: ignore[misc]
    base.recompile()
    module = check((base, inputs), ScheduleTwoPhase())
    assert count(module) == {"inter_block": 1, "merge": 2}


def test_first_phase_is_in_front_of_its_first_read() -> None:
    module, _ = graph(seeded(lambda: Plain((1, 1, 1, 1, 1))))
    run((ScheduleTwoPhase(),), subject(module))
    assert len(phases(module)) == 2
    for phase in phases(module):
        node = phase.next
        while node.target is not OPS.merge.default:
            # nothing but the phase's own results lies between
            assert node.meta[STAMP] == NAME
            node = node.next
        assert node.args[0].args[1] == 0  # type: ignore[union-attr]
        assert node.meta["stack_trace"] == phase.meta["stack_trace"]


class TwoLines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        blocks = [x, x.sin()]
        first = read(blocks, aten_row(self.query, 0), None)
        return first, read([*blocks, x.cos()], aten_row(self.query, 1), None)


def test_marks_are_those_of_the_reads() -> None:
    module, _ = graph(seeded(TwoLines))
    traces = [n.meta["stack_trace"] for n in module.graph.nodes if n.target is OPS.depth_attention.default]
    assert "first = read(" in traces[0]
    assert "return first, read(" in traces[1]
    run((ScheduleTwoPhase(),), subject(module))
    merges = module.graph.find_nodes(op="call_function", target=OPS.merge.default)
    assert [n.meta["stack_trace"] for n in merges] == traces
    assert phases(module)[0].meta["stack_trace"] == traces[0]
    assert {n.meta[STAMP] for n in module.graph.nodes if STAMP in n.meta} == {NAME}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    found = graph(seeded(lambda: Plain((2, 2, 1)), dtype))
    module, inputs = found
    expected = module(*inputs)[0]
    run((ScheduleTwoPhase(),), subject(module))
    merges = [n for n in module.graph.nodes if n.target is OPS.merge.default]
    # without a partial sum to take the dtype from, a cast follows
    results = [n if n.meta["val"].dtype == dtype else next(iter(n.users)) for n in merges]
    assert [n.meta["val"].dtype for n in results] == [dtype] * 3
    actual = module(*inputs)[0]
    assert actual.dtype == dtype
    assert_close(actual, expected)
