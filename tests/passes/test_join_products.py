"""The products of a block with the keys of later reads become one; no other product moves."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from attnres_compile.passes import lower_factored
from attnres_compile.passes._emit import STAMP
from attnres_compile.passes.base import run
from attnres_compile.passes.join_products import NAME, JoinProducts
from attnres_compile.passes.lower_factored import LowerFactored
from tests.passes.models import WIDTH
from tests.passes.reads import EPS, OPS
from tests.passes.tracing import example, operations, subject
from tests.tolerances import assert_close

aten = torch.ops.aten


def phases(b0: Tensor, query: Tensor, key_norm: Tensor) -> list[Tensor]:
    """Three first phases, each over one block more; each new block is made of what the last phase gave."""
    blocks, results = [b0], []
    for i in range(3):
        rows = slice(2 * i, 2 * i + 2)
        o, m, l = OPS.inter_block.default(blocks, query[rows], key_norm[rows], EPS)
        blocks.append((o / l.unsqueeze(-1)).sum(0).cos())
        results += [o, m, l]
    return [*results, blocks[-1]]


def lowered(function: Any, *inputs: Tensor) -> fx.GraphModule:
    module = make_fx(function, tracing_mode="symbolic")(*inputs)
    run((LowerFactored(),), subject(module))
    return module


def inputs(length: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return (
        example(2, length, WIDTH).double(),
        example(6, WIDTH, seed=1).double(),
        example(6, WIDTH, seed=2).double(),
    )


def test_one_product_for_each_block() -> None:
    module = lowered(phases, *inputs())
    assert operations(module).count("aten.mm.default") == 3 + 2 + 1
    run((JoinProducts(),), subject(module))
    assert operations(module).count("aten.mm.default") == 3
    added = [node for node in module.graph.nodes if node.meta.get(STAMP) == NAME]
    assert [node.target for node in added].count(aten.slice.Tensor) == 3 + 2
    for length in (3, 5):
        for actual, expected in zip(module(*inputs(length)), phases(*inputs(length)), strict=True):
            assert actual.dtype == torch.float64
            assert_close(actual, expected)
    before = str(module.graph)
    assert not JoinProducts()(subject(module))
    assert str(module.graph) == before


def test_the_models_own_products_stay() -> None:
    def own(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return x @ a + x @ b

    module = make_fx(own, tracing_mode="fake")(*(example(WIDTH, WIDTH, seed=seed) for seed in range(3)))
    assert operations(module).count("aten.mm.default") == 2
    assert not JoinProducts()(subject(module))
    assert operations(module).count("aten.mm.default") == 2


def test_keys_that_come_of_the_product_stay_behind_it() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = x @ a
        return first, x @ (b + first.sum()), x @ b

    tensors = [example(WIDTH, WIDTH, seed=seed) for seed in range(3)]
    module = make_fx(function, tracing_mode="fake")(*tensors)
    for node in module.graph.find_nodes(op="call_function", target=aten.mm.default):
        node.meta[STAMP] = lower_factored.NAME
    run((JoinProducts(),), subject(module))
    assert operations(module).count("aten.mm.default") == 2
    for actual, expected in zip(module(*tensors), function(*tensors), strict=True):
        assert_close(actual, expected)
