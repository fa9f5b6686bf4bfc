"""What nothing depends on goes, and what does more than return a value stays."""

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from attnres_compile.passes.base import run
from attnres_compile.passes.remove_dead import RemoveDead
from tests.passes.models import WIDTH
from tests.passes.reads import Reading, aten_row, check, graph, read, seeded, untouched
from tests.passes.tracing import example, listing, subject

aten = torch.ops.aten


def by_hand(*calls: tuple[str, Any, tuple[Any, ...]]) -> fx.GraphModule:
    """A graph of calls on its input ``x`` whose results nobody uses."""
    g = fx.Graph()
    x = g.placeholder("x")
    for kind, target, others in calls:
        g.create_node(kind, target, (x, *others))
    g.output(x)
    root = nn.Module()
    root.add_module("linear", nn.Linear(WIDTH, WIDTH))
    return fx.GraphModule(root, g)


def test_listing() -> None:
    def body(m: Any, x: Tensor) -> list[Tensor]:
        states = torch.stack([x, x.sin()]).unbind()
        read(states, *m.row(0))
        return [states[0].cos()]

    found = graph(seeded(lambda: Reading(body)))
    assert listing(found[0]) == [
        "sin = sin(x)",
        "stack = stack([x, sin])",
        "unbind = unbind.int(stack)",
        "getitem = getitem(unbind, 0)",
        "getitem_1 = getitem(unbind, 1)",
        "select = select.int(0, 0)",
        "select_1 = select.int(0, 0)",
        "depth_attention = depth_attention([getitem, getitem_1], select, select_1, 0.001, 2.0)",
        "cos = cos(getitem)",
        "output = output([cos])",
    ]
    inputs = [node.name for node in found[0].graph.find_nodes(op="placeholder")]
    module = check(found, RemoveDead())
    assert listing(module) == [
        "sin = sin(x)",
        "stack = stack([x, sin])",
        "unbind = unbind.int(stack)",
        "getitem = getitem(unbind, 0)",
        "cos = cos(getitem)",
        "output = output([cos])",
    ]
    assert [node.name for node in module.graph.find_nodes(op="placeholder")] == inputs


def test_a_chain_goes_as_a_whole() -> None:
    module = by_hand()
    module.register_parameter("weight", nn.Parameter(torch.ones(WIDTH)))
    (x, output) = module.graph.nodes
    with module.graph.inserting_before(output):
        node = x
        for _ in range(5):
            node = module.graph.call_function(aten.sin.default, (node,))
        row = module.graph.call_function(operator.getitem, (node, 0))
        module.graph.call_function(aten.add.Tensor, (row, module.graph.get_attr("weight")))
    run((RemoveDead(),), subject(module))
    assert list(module.graph.nodes) == [x, output]


def python_function(x: Tensor) -> Tensor:
    return x.add_(1)


@pytest.mark.parametrize(
    "call",
    [
        ("call_method", "add_", (1,)),
        ("call_method", "sin", ()),
        ("call_function", aten.add_.Tensor, (1,)),
        ("call_function", aten.copy_.default, (1,)),
        ("call_function", aten.bernoulli.default, ()),
        ("call_function", aten.dropout.default, (0.5, True)),
        ("call_function", aten._assert_async.default, ()),
        ("call_function", aten._assert_tensor_metadata.default, ()),
        ("call_function", aten.sym_constrain_range_for_size.default, ()),
        ("call_function", operator.iadd, (1,)),
        ("call_function", operator.setitem, (0, 0)),
        ("call_function", torch._check, ()),
        ("call_function", python_function, ()),
        ("call_module", "linear", ()),
    ],
    ids=lambda call: getattr(call[1], "__name__", str(call[1])),
)
def test_what_may_do_more_stays(call: tuple[str, Any, tuple[Any, ...]]) -> None:
    untouched((by_hand(call), []), RemoveDead())


def test_a_method_that_writes_keeps_its_effect() -> None:
    module = by_hand(("call_method", "add_", (1,)), ("call_function", aten.sin.default, ()))
    run((RemoveDead(),), subject(module))
    assert [node.target for node in module.graph.nodes] == ["x", "add_", "output"]
    assert torch.equal(module(example()), example() + 1)


def test_rows_of_dead_reads_go() -> None:
    def body(m: Any, x: Tensor) -> list[Tensor]:
        aten_row(m.query, 0)
        return [x.sin()]

    module = check(graph(seeded(lambda: Reading(body))), RemoveDead())
    assert listing(module) == ["sin = sin(x)", "output = output([sin])"]
    untouched((module, []), RemoveDead())
