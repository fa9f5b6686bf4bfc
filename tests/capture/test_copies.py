"""A copy shares the parameters and nothing else."""

import pytest
import torch
from torch import Tensor, fx, nn

from attnres_compile.capture.copies import shared_copy
from attnres_compile.errors import RefusedError
from tests.passes.models import Net
from tests.passes.tracing import example


class Stateful(nn.Module):
    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.tied = self.linear
        self.register_buffer("running", torch.zeros(3))
        self.calls: list[int] = []
        self.options = {"scale": 2.0}
        self.constant = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        self.running += 1
        return self.linear(x) * self.options["scale"] + self.constant


def test_parameters_are_the_originals_own() -> None:
    model = Stateful()
    copied = shared_copy(model)
    assert type(copied) is Stateful
    assert copied is not model
    assert [id(p) for p in copied.parameters()] == [id(p) for p in model.parameters()]
    assert copied.tied is copied.linear
    assert copied.linear is not model.linear


def test_nothing_else_is_shared() -> None:
    model = Stateful()
    copied = shared_copy(model)
    assert isinstance(copied, Stateful)
    copied(torch.zeros(2, 3))
    copied.options["scale"] = 3.0
    copied.constant.zero_()
    copied.eval()
    assert torch.equal(model.running, torch.zeros(3))
    assert torch.equal(copied.running, torch.ones(3))
    assert (model.calls, model.options, model.training) == ([], {"scale": 2.0}, True)
    assert torch.equal(model.constant, torch.ones(3))


def test_hooks_and_modules_of_a_copy_are_its_own() -> None:
    model = Stateful()
    model.register_forward_hook(lambda m, args, out: out + 1)
    copied = shared_copy(model)
    copied.get_submodule("linear").register_forward_hook(lambda m, args, out: out * 0)
    copied.add_module("extra", nn.Linear(1, 1))
    assert not model.linear._forward_hooks
    assert "extra" not in dict(model.named_modules())
    assert bool((copied(torch.zeros(1, 3)) == 2).all())


def test_a_parameter_put_in_place_of_another_stays_on_the_copy() -> None:
    model = Stateful()
    copied = shared_copy(model)
    copied.get_submodule("linear").weight = nn.Parameter(torch.zeros(3, 3))
    assert model.linear.weight.any()


def test_graph_modules() -> None:
    module = fx.symbolic_trace(Net())
    copied = shared_copy(module)
    assert isinstance(copied, fx.GraphModule)
    assert copied.graph is not module.graph
    assert str(copied.graph) == str(module.graph)
    assert copied.get_parameter("embed.weight") is module.get_parameter("embed.weight")
    assert torch.equal(copied(example()), module(example()))


def test_what_cannot_be_copied_is_refused() -> None:
    model = Stateful()
    model.kept = model.linear(torch.ones(1, 3)) * 2
    with pytest.raises(RefusedError, match=r"Stateful cannot be copied \(\w+: .*\); .* detach it"):
        shared_copy(model)
