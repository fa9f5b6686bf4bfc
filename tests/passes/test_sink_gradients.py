"""Sums of scattered rows move to the end of the graph, and nothing else moves."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from attnres_compile.passes.base import run
from attnres_compile.passes.sink_gradients import SinkGradients
from tests.passes.tracing import example, subject
from tests.tolerances import assert_close

aten = torch.ops.aten


def traced(function: Any) -> tuple[fx.GraphModule, Tensor]:
    x = example(3, 4)
    return make_fx(function, tracing_mode="fake")(x), x


def order(module: fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if node.op == "call_function"]


def rows(x: Tensor, used: bool = False) -> list[Tensor]:
    zeros = aten.full.default([3, 4], 0.0)
    total = aten.select_scatter.default(zeros, x[2].sin(), 0, 2)
    late = (total if used else x).cos()
    total = total + aten.slice_scatter.default(zeros, late[:2], 0, 0, 2)
    weight = late.t().mm(x)
    return [total, weight]


def test_sums_come_last() -> None:
    module, x = traced(lambda x: rows(x))
    expected = module(x)
    assert order(module)[-1] == "mm"
    run((SinkGradients(),), subject(module))
    assert order(module)[-4:] == ["mm", "select_scatter", "slice_scatter", "add"]
    for actual, wanted in zip(module(x), expected, strict=True):
        assert_close(actual, wanted)
    before = order(module)
    assert not SinkGradients()(subject(module))
    assert order(module) == before


def test_a_term_that_is_needed_stays() -> None:
    module, x = traced(lambda x: rows(x, used=True))
    expected = module(x)
    run((SinkGradients(),), subject(module))
    names = order(module)
    assert names.index("select_scatter") < names.index("cos") < names.index("mm") < names.index("add")
    for actual, wanted in zip(module(x), expected, strict=True):
        assert_close(actual, wanted)


def test_other_sums_stay() -> None:
    module, _ = traced(lambda x: [x.sin() + x, x.cos()])
    before = order(module)
    assert not SinkGradients()(subject(module))
    assert order(module) == before
