"""Which argument, or which part of an output, is a chain's source: the values tell."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnres_compile.attach import Attachment, Place
from attnres_compile.capture.inputs import Inputs
from attnres_compile.capture.trace import capture
from attnres_compile.errors import RefusedError
from attnres_compile.passes.base import run
from attnres_compile.passes.pipelines import live
from attnres_compile.placement import _nearest, attachments
from tests.passes import models
from tests.passes.models import WIDTH, Block, Net, Pair
from tests.passes.tracing import example, subject


def found(model: nn.Module, *, outermost: bool = True) -> list[Attachment]:
    inputs = Inputs((example(),), {})
    captured = capture(model, inputs)
    chains = run(live(outermost=outermost), subject(captured.module, block_size=2)).chains
    assert chains
    return attachments(model, captured, chains, inputs)


def only(model: nn.Module) -> Attachment:
    (attachment,) = found(model)
    return attachment


def test_attachment_of_a_plain_model() -> None:
    attachment = only(Net())
    assert (attachment.module, attachment.place, attachment.output) == ("layers.0", Place("x", 0, ()), False)
    assert attachment.anchors == (("layers.0", (0,)), ("layers.1", (2,)))
    assert attachment.readers == ("layers.0.f", "layers.0.g", "layers.1.f", "layers.1.g", "norm")
    assert attachment.exits == ("",)
    assert (attachment.width, attachment.axis) == (WIDTH, -1)
    assert attachment.plan.block_sizes == (2, 2)


def test_innermost_readers() -> None:
    (attachment,) = found(Net(), outermost=False)
    assert attachment.readers == ("layers.0.f.norm", "layers.0.g.norm", "layers.1.f.norm", "layers.1.g.norm", "norm")


def test_exits_from_the_container_outwards() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Sequential(Block(), Block())

        def forward(self, x: Tensor) -> Tensor:
            return self.stack(x)

    class Model(Net):
        def __init__(self) -> None:
            super().__init__(Encoder())

    assert only(Model()).exits == ("layers.0.stack", "layers.0", "layers", "")


class Second(Pair):
    """The stream is the second of three arguments of one shape."""

    def forward(self, other: Tensor, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.f(x)
        return x + self.g(x) * other.sigmoid()


class SecondArgument(Net):
    keyword = False

    def __init__(self) -> None:
        super().__init__(Second(), Second())

    def middle(self, x: Tensor) -> Tensor:
        other = x.cos()
        for layer in self.layers:
            x = layer(other, x=x) if self.keyword else layer(other, x, x.sin())
        return x


class SecondKeyword(SecondArgument):
    keyword = True


class Packed(Block):
    def forward(self, state: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {"extra": state["extra"], "x": (None, super().forward(state["x"][1]))}


class InContainer(Net):
    def __init__(self) -> None:
        super().__init__(Packed(), Packed())

    def middle(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"extra": x.cos(), "x": (None, x)}
        for layer in self.layers:
            state = layer(state)
        return state["x"][1]


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (SecondArgument, Place("x", 1, ())),
        (SecondKeyword, Place("x", 1, ())),
        (InContainer, Place("state", 0, ("x", 1))),
    ],
)
def test_place_of_the_source(make: Callable[[], nn.Module], place: Place) -> None:
    attachment = only(make())
    assert (attachment.module, attachment.place) == ("layers.0", place)


def test_place_that_holds_the_source_at_most_calls() -> None:
    """Both arguments are the source at the first call, and one of them is a later state at the second."""
    source, later = example(2, 5, WIDTH), example(2, 5, WIDTH, seed=1)
    x, y = Place("x", 0, ()), Place("y", 1, ())
    assert _nearest(source, [(x, source), (y, source)]) == x
    assert _nearest(source, [(x, source), (y, source), (x, later), (y, source)]) == y
    assert _nearest(source, [(x, later), (y, source + 1e-3)]) == y
    assert _nearest(source, [(x, source[0])]) is None


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.linear(x).cos(), {"first": self.linear(x) * 3, "x": self.linear(x).tanh()}


class OutputPart(models.OuterAdds):
    def __init__(self) -> None:
        super().__init__()
        self.embed = TwoOutputs()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.middle(self.embed(x)[1]["x"]))


def test_part_of_an_output() -> None:
    attachment = only(OutputPart())
    assert (attachment.module, attachment.output, attachment.place) == ("embed", True, Place(None, None, (1, "x")))
    assert attachment.anchors == ()


def test_two_chains() -> None:
    first, second = found(models.TwoStreams())
    assert [first.module, second.module] == ["layers.0", "layers.2"]
    assert [first.plan.chain, second.plan.chain] == [0, 1]
    assert {path for path, _ in first.anchors} == {"layers.0", "layers.1"}
    assert {path for path, _ in second.anchors} == {"layers.2", "layers.3"}


def test_shared_module_has_all_of_its_visits() -> None:
    assert only(models.Shared()).anchors == (("layers.0", (0, 2, 4)),)

    class TwoNames(Net):
        def __init__(self) -> None:
            block = Block()
            super().__init__(block, block, block)

    assert only(TwoNames()).anchors == (("layers.0", (0, 2, 4)),)


def test_later_layers_start_the_stream_only_where_it_always_enters() -> None:
    class Again(Net):
        """The second layer is called once more, with the normed source."""

        def middle(self, x: Tensor) -> Tensor:
            aside = self.layers[1](self.norm(x))
            for layer in self.layers:
                x = layer(x)
            return x + aside

    (attachment,) = found(Again(Block(), Block(), Block()))
    assert [path for path, _ in attachment.later] == ["layers.2"]


def test_source_among_no_values_is_refused() -> None:
    """The layer receives an object that hides the tensor."""

    class Box:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    class Hidden(Block):
        def forward(self, box: Box) -> Box:  # type: ignore[override]
            return Box(super().forward(box.x))

    class Boxed(Net):
        def __init__(self) -> None:
            super().__init__(Hidden(), Hidden())

        def middle(self, x: Tensor) -> Tensor:
            box = Box(x)
            for layer in self.layers:
                box = layer(box)
            return box.x

    with pytest.raises(RefusedError, match=r"is not among the tensors that cross the boundary of 'layers.0'"):
        found(Boxed())


def test_model_and_generator_are_left_alone() -> None:
    model = Net().train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    found(model)
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
