"""Both phases become plain reads again: which of them, and the same numbers as before."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import attnres_compile as ac
from attnres_compile.passes.base import run
from attnres_compile.passes.join_phases import JoinPhases
from attnres_compile.passes.remove_dead import RemoveDead
from attnres_compile.passes.schedule_two_phase import ScheduleTwoPhase
from tests.passes.models import WIDTH
from tests.passes.reads import EPS, OPS, SIZES, Plain, assert_same, check, count, graph, outcome, seeded, untouched
from tests.passes.tracing import exported, listing, subject
from tests.tolerances import assert_close

PASSES = (JoinPhases(), RemoveDead())


class Phases(nn.Module):
    """Two reads of one first phase; the first one's fp32 sum is cast, or used as it is."""

    def __init__(self, *, cast: bool = True, row: int = 1, eps: float = EPS) -> None:
        super().__init__()
        self.query, self.key_norm = (nn.Parameter(torch.randn(3, WIDTH)) for _ in range(2))
        self.cast, self.row, self.eps = cast, row, eps

    def forward(self, x: Tensor) -> Tensor:
        blocks, row = [x, x.sin()], torch.ops.aten.select.int
        o, m, l = (t.unbind(0) for t in OPS.inter_block(blocks, self.query[:2], self.key_norm[:2], EPS))
        first = OPS.merge(o[0], m[0], l[0], None, None, None, EPS, 2.0)
        state = first.to(x.dtype)
        vectors = row(self.query, 0, self.row), row(self.key_norm, 0, self.row)
        second: Tensor = OPS.merge(o[1], m[1], l[1], state.cos(), *vectors, self.eps, 3.0)
        return second + (state if self.cast else first)


def half(model: nn.Module) -> fx.GraphModule:
    """The graph of a model in fp16, where a first read leaves its phase in fp32."""
    return exported(seeded(lambda: model, torch.float16), torch.randn(2, 3, WIDTH).half()).module


def test_listing() -> None:
    module = half(Phases())
    run(PASSES, subject(module))
    lines = [line for line in listing(module) if "_assert_tensor_metadata" not in line]
    assert lines == [
        "sin = sin(x)",
        "slice_1 = slice.Tensor(0, 0, 2)",
        "slice_2 = slice.Tensor(0, 0, 2)",
        "select_int = select.int(slice_1, 0, 0)",
        "select_int_1 = select.int(slice_2, 0, 0)",
        "depth_attention_default = depth_attention([x, sin], select_int, select_int_1, 0.001, 2.0)",
        "select = select.int(0, 1)",
        "select_1 = select.int(0, 1)",
        "cos = cos(depth_attention_default)",
        "depth_attention_default_1 = depth_attention([x, sin, cos], select, select_1, 0.001, 3.0)",
        "add = add.Tensor(depth_attention_default_1, depth_attention_default)",
        "output = output([add])",
    ]


@pytest.mark.parametrize("key_norm", [True, False])
@pytest.mark.parametrize("sizes", SIZES[:-1], ids=str)
def test_undoes_the_schedule(sizes: tuple[int, ...], key_norm: bool) -> None:
    found = graph(seeded(lambda: Plain(sizes, key_norm=key_norm)))
    reads = count(found[0])
    expected = outcome(found)
    run((ScheduleTwoPhase(),), subject(found[0]))
    assert "merge" in count(found[0])
    assert count(check(found, *PASSES)) == reads
    assert_same(outcome(found), expected)


def test_fp16_equals_fp32() -> None:
    module = half(Phases())
    run(PASSES, subject(module))
    assert count(module) == {"depth_attention": 2}
    model, x = seeded(Phases).float(), torch.randn(2, 3, WIDTH).half()
    parameters = [p.half() for p in (model.query, model.key_norm)]
    assert_close(module(*parameters, x)[0], model(x.float()))


@pytest.mark.parametrize("options", [{"row": 0}, {"eps": 2 * EPS}], ids=str)
def test_other_vectors_stay(options: dict[str, Any]) -> None:
    module = exported(seeded(lambda: Phases(**options), torch.float32), torch.randn(2, 3, WIDTH)).module
    run(PASSES, subject(module))
    assert count(module) == {"inter_block": 1, "depth_attention": 1, "merge": 1}


def test_wanted_in_fp32() -> None:
    module = half(Phases(cast=False))
    run(PASSES, subject(module))
    assert count(module) == {"inter_block": 1, "merge": 1, "depth_attention": 1}


def test_plain_reads_are_left() -> None:
    untouched(graph(seeded(lambda: Plain((2, 2, 1)))), JoinPhases())


def test_graph_of_a_stream() -> None:
    model = nn.Sequential(*(Residual() for _ in range(6)))
    x = torch.randn(2, 3, WIDTH)
    transformed = ac.transform(model, x, num_blocks=3, verify="off")
    for parameter in transformed.attnres.parameters():  # type: ignore[union-attr]
        nn.init.normal_(parameter)
    program = torch.export.export(transformed.eval(), (x,))
    assert count(program.graph_module)["inter_block"] == 2
    run(PASSES, subject(program.graph_module))
    assert count(program.graph_module) == {"depth_attention": 6}
    assert_close(program.module()(x), transformed(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def test_result_of_an_exported_program() -> None:
    class Last(Phases):
        def forward(self, x: Tensor) -> Tensor:
            o, m, l = (t.unbind(0) for t in OPS.inter_block([x, x.sin()], self.query[:2], None, EPS))
            result: Tensor = OPS.merge(o[1], m[1], l[1], None, None, None, EPS, 2.0)
            return result

    model, x = seeded(Last, torch.float32), torch.randn(2, 3, WIDTH)
    program = torch.export.export(model, (x,))
    run(PASSES, subject(program.graph_module))
    assert count(program.graph_module) == {"depth_attention": 1}
    assert_close(program.module()(x), model(x))
