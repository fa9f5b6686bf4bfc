"""Gradients that reads have for one source are added as they come, and no other sum is touched."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from attnres_compile.passes.accumulate_gradients import AccumulateGradients
from attnres_compile.passes.base import run
from tests.passes.tracing import example, listing, operations, subject
from tests.tolerances import assert_close

ops = torch.ops.attnres_compile
ACCUMULATE = "attnres_compile.accumulate.default"


def backward(*inputs: Tensor) -> list[Tensor]:
    """Gradients of two sources from two reads, summed as autograd sums them, one of them with a norm's as well."""
    grad, norm, b0, b1, query = inputs
    blocks = [b0, b1]
    first, keys = ops.depth_attention_backward(grad, blocks, query, None, 1e-6, 2.0)
    statistics = grad[None], grad[None, ..., 0], grad[None, ..., 0]
    second, _ = ops.inter_block_backward(*statistics, blocks, query[None], None, 1e-6)
    third, _ = ops.depth_attention_backward(grad.sin(), blocks, query, None, 1e-6, 2.0)
    return [first[0] + second[0] + third[0], first[1] + norm + second[1], keys]


def traced(function: Any = backward) -> tuple[fx.GraphModule, list[Tensor]]:
    inputs = [example(seed=seed) for seed in range(4)] + [example(3)]
    return make_fx(function, tracing_mode="fake")(*inputs), inputs


def test_sums_of_gradients_only() -> None:
    module, inputs = traced()
    expected = module(*inputs)
    assert operations(module).count("aten.add.Tensor") == 4
    run((AccumulateGradients(),), subject(module))
    assert operations(module).count(ACCUMULATE) == 2
    assert operations(module).count("aten.add.Tensor") == 2
    for actual, wanted in zip(module(*inputs), expected, strict=True):
        assert_close(actual, wanted)
    before = listing(module)
    assert not AccumulateGradients()(subject(module))
    assert listing(module) == before


def test_scaled_and_broadcast_sums_stay() -> None:
    def function(*inputs: Tensor) -> list[Tensor]:
        grad, _, b0, b1, query = inputs
        grads, _ = ops.depth_attention_backward(grad, [b0, b1], query, None, 1e-6, 2.0)
        scaled = torch.ops.aten.add.Tensor(grads[0], grads[1], alpha=2)
        return [scaled, grads[0] + grads[1][:1]]

    module, _ = traced(function)
    assert not AccumulateGradients()(subject(module))


def test_every_addition_names_its_pass() -> None:
    module, _ = traced()
    run((AccumulateGradients(),), subject(module))
    stamps = [n.meta.get("attnres_compile_pass") for n in module.graph.nodes if str(n.target) == ACCUMULATE]
    assert stamps == ["accumulate_gradients"] * 2
