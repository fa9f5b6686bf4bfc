"""A state between checkpointed layers that is a view: what it is a view of is kept."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.partitioners import cleanup_recompute_tags, min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import attnres_compile as ac
from attnres_compile.passes.base import run
from attnres_compile.passes.keep_states import KeepStates
from tests.passes.tracing import example, operations, subject
from tests.tolerances import assert_close


def layers(x: Tensor) -> Tensor:
    """Three layers in one; `tagged` says which node belongs to which."""
    first = x.mm(x)
    state = first.view(1, 4, 4).transpose(1, 2)
    second = state.sin()
    inside = second.view(4, 4).cos()
    return inside + second.view(4, 4)


LAYER = {"mm": 1, "view": 1, "transpose": 1, "sin": 2, "view_1": 2, "cos": 2, "view_2": 2, "add": 3}


def tagged() -> fx.GraphModule:
    with FakeTensorMode() as mode:
        module = make_fx(layers)(mode.from_tensor(example(4, 4)))
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.meta |= {"ac_graph_id": LAYER[node.name], "recompute": CheckpointPolicy.PREFER_RECOMPUTE}
    return module


def kept(module: fx.GraphModule) -> list[str]:
    cleanup_recompute_tags(module, is_default_partition=False)
    return [n.name for n in module.graph.nodes if n.meta.get("recompute") == CheckpointPolicy.MUST_SAVE]


def test_views_go_with_the_layer_that_uses_them() -> None:
    assert kept(tagged()) == ["transpose", "cos", "view_2"]
    module = tagged()
    run((KeepStates(),), subject(module))
    assert kept(module) == ["mm", "sin", "cos"]
    assert not KeepStates()(subject(module))


def test_graphs_without_checkpointing_stay() -> None:
    module = make_fx(layers, tracing_mode="fake")(example(4, 4))
    assert not KeepStates()(subject(module))


class Layer(nn.Module):
    """One sublayer, whose branch is a view of its linear layer's result; so is the state after the first."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """Four checkpointed layers."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Layer(d) for _ in range(4)), nn.RMSNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.norm(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_as_much_is_computed_anew_as_without_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    backwards: list[fx.GraphModule] = []

    def partition(*args: Any, **kwargs: Any) -> Any:
        parts = min_cut_rematerialization_partition(*args, **kwargs)
        backwards.append(parts[1])
        return parts

    monkeypatch.setattr("torch._inductor.compile_fx.min_cut_rematerialization_partition", partition)
    monkeypatch.setattr("torch._functorch.config.enable_autograd_cache", False)
    torch._dynamo.reset()
    original, x = Net().double(), example(2, 3, 8).double()
    model = ac.transform(original, x, block_size=4, verify="off")
    gradients = []
    for compiled in (torch.compile(original), torch.compile(model, backend="attnres")):
        gradients.append(torch.autograd.grad(compiled(x).sin().sum(), list(original.parameters())))
    for actual, expected in zip(*reversed(gradients), strict=True):
        assert_close(actual, expected)
    # The first linear layer of each, and the second one of the last.
    assert [operations(backward).count("aten.addmm.default") for backward in backwards] == [5, 5]
