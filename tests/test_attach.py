"""Hooks at module boundaries turn a tensor into a stream and back."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnres_compile.attach import Attachment, Place, argument_places, at_path, attach, is_attached, places
from attnres_compile.errors import RefusedError
from attnres_compile.ops import reference
from attnres_compile.reads import DepthReads
from attnres_compile.stream import is_stream
from tests.passes.models import Block, Net, OuterAdds
from tests.stream_material import EPS, plan_of, random
from tests.tolerances import assert_close

WIDTH = 8
X = random(2, 5, 3)


def attachment(**changed: Any) -> Attachment:
    """What the analysis finds for `Net`: two blocks of two sublayers each."""
    found: dict[str, Any] = {
        "plan": plan_of([2, 2]),
        "width": WIDTH,
        "axis": -1,
        "module": "layers.0",
        "place": Place("x", 0, ()),
        "output": False,
        "anchors": (("layers.0", (0,)), ("layers.1", (2,))),
        "readers": ("layers.0.f", "layers.0.g", "layers.1.f", "layers.1.g", "norm"),
        "exits": ("",),
    }
    return Attachment(**{**found, **changed})


def plain(make: Callable[[], nn.Module] = Net) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double().eval()


def randomise(model: Any) -> None:
    for reads in model.attnres:
        with torch.no_grad():
            reads.query.copy_(random(*reads.query.shape, seed=1))
            reads.key_norm.copy_(1 + random(*reads.key_norm.shape, seed=2) / 4)


def attached(make: Callable[[], nn.Module] = Net, **changed: Any) -> Any:
    model = plain(make)
    attach(model, [attachment(**changed)], key_norm=True)
    randomise(model)
    return model


def expected(model: Any, x: Tensor = X) -> Tensor:
    """Block AttnRes by hand over the same parameters."""
    original = plain()
    original.load_state_dict(model.state_dict(), strict=False)
    sublayers = [branch for layer in original.layers for branch in (layer.f, layer.g)]
    (reads,) = model.attnres
    source = original.embed(x)
    final = reference.block_attnres(source, sublayers, reads.query, reads.key_norm, [2, 2], eps=EPS, preserve=True)
    return original.norm(final)


def test_computes_block_attnres() -> None:
    model = attached()
    assert_close(model(X), expected(model))
    assert not torch.allclose(model(X), plain()(X))


def test_zero_queries_compute_the_original() -> None:
    model = attached()
    model.attnres[0].reset_parameters()
    assert_close(model(X), plain()(X))


def test_state_and_class() -> None:
    model = attached()
    kind = type(model)
    assert kind is Net
    assert model.state_dict().keys() - plain().state_dict().keys() == {"attnres.0.query", "attnres.0.key_norm"}
    assert isinstance(model.attnres[0], DepthReads)
    assert {p.dtype for p in model.attnres.parameters()} == {torch.float64}
    without = plain()
    attach(without, [attachment()], key_norm=False)
    assert without.attnres[0].key_norm is None


def test_what_modules_receive() -> None:
    """Layers get the stream, readers the mix, and the caller a tensor."""
    model = attached()
    seen: dict[str, tuple[bool, bool]] = {}
    for name, module in model.named_modules():
        if name and "attnres" not in name:
            module.register_forward_hook(
                lambda m, args, out, name=name: seen.__setitem__(name, (is_stream(args[0]), is_stream(out)))
            )
    assert not is_stream(model(X))
    assert seen["layers.0"] == seen["layers.1"] == (True, True)
    assert seen["layers.0.f"] == seen["layers.1.g"] == seen["norm"] == seen["embed"] == (False, False)


def test_exit_of_a_model_that_ends_with_its_stream() -> None:
    model = attached(readers=("layers.0.f", "layers.0.g", "layers.1.f", "layers.1.g"))
    model.norm = nn.Identity()
    out = model(X)
    assert type(out) is Tensor
    # an inner exit reads as well, so that nothing of the stream is left outside
    inner = attached(exits=("layers.1", ""))
    assert_close(inner(X), expected(inner))
    early = attached(exits=("layers.0", ""), anchors=())
    assert early.layers[0](random(2, 5, WIDTH)).shape == (2, 5, WIDTH)


def test_keyword_and_positional_calls() -> None:
    class Keywords(Net):
        def middle(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x=x)
            return x

    model = attached(Keywords)
    assert_close(model(X), expected(model))


def test_anchors_keep_the_rows_when_a_layer_is_left_out() -> None:
    class Skipping(Net):
        def middle(self, x: Tensor) -> Tensor:
            return self.layers[1](x)

    model = attached(Skipping, module="layers.1")
    (reads,), original = model.attnres, plain()
    f, g = original.layers[1].f, original.layers[1].g
    first = original.embed(X)
    branch = f(first)

    def read(sources: list[Tensor], row: int) -> Tensor:
        scale = float(len(sources))
        return reference.depth_attention(sources, reads.query[row], reads.key_norm[row], eps=EPS, scale=scale)

    second = branch + g(read([first, branch], 2))
    assert_close(model(X), original.norm(read([first, second], 3)))


def test_source_that_is_an_output() -> None:
    model = plain(OuterAdds)
    place = Place(None, None, ())
    readers = ("layers.0", "layers.1", "layers.2", "norm")
    plan = plan_of([1, 1, 1])
    found = attachment(plan=plan, module="embed", place=place, output=True, anchors=(), readers=readers)
    attach(model, [found], key_norm=True)
    randomise(model)
    original = plain(OuterAdds)
    (reads,) = model.attnres
    final = reference.block_attnres(
        original.embed(X), list(original.layers), reads.query, reads.key_norm, [1, 1, 1], eps=EPS, preserve=True
    )
    assert_close(model(X), original.norm(final))


@pytest.mark.parametrize("value", [torch.arange(WIDTH).expand(2, 5, WIDTH), random(2, 5, 7), random(WIDTH), None, "x"])
def test_starts_with_floats_of_the_width_alone(value: Any) -> None:
    model = nn.Identity().double()
    attach(model, [attachment(module="", place=Place("input", 0, ()), anchors=(), readers=(), exits=())], key_norm=True)
    assert model(value) is value
    assert is_stream(model(random(2, 5, WIDTH)))


def test_a_stream_stays_the_one_that_it_is() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = Net(Nested(), Nested()).double()
    attach(model, [attachment(readers=(), anchors=())], key_norm=True)
    hook = next(iter(model.layers[0]._forward_pre_hooks.values()))
    stream = hook(model.layers[0], (random(2, 5, WIDTH),), {})[0][0]
    assert is_stream(stream)
    assert hook(model.layers[0], (stream,), {}) is None


def test_other_arguments_that_are_the_same_tensor() -> None:
    """A state kept for later starts as the same tensor: it is the same stream."""

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.g = Block().f, Block().g

        def forward(self, x: Tensor, kept: dict[str, Tensor]) -> Tensor:
            assert kept["x"] is x
            return x + self.f(x)

    class Holder(Net):
        def middle(self, x: Tensor) -> Tensor:
            return self.layers[0](x, {"x": x, "other": x + 1})

    model = Holder(Kept()).double()
    found = attachment(anchors=(), readers=("layers.0.f", "norm"))
    attach(model, [found], key_norm=True)
    assert model(X).shape == (2, 5, WIDTH)


def test_model_that_calls_its_children() -> None:
    def make() -> nn.Module:
        net = Net()
        return nn.Sequential(net.embed, *net.layers, net.norm)

    model = attached(make, module="1", place=Place("x", 0, ()), anchors=(("1", (0,)), ("2", (2,))), readers=("3",))
    assert model(X).shape == (2, 5, WIDTH)


def test_is_attached() -> None:
    assert not is_attached(plain())
    assert is_attached(attached())
    model = plain()
    model.register_forward_hook(lambda m, args, out: out)
    assert not is_attached(model)
    model = plain(OuterAdds)
    place, readers = Place(None, None, ()), ("layers.0",)
    attach(model, [attachment(module="embed", place=place, output=True, anchors=(), readers=readers)], key_norm=True)
    assert is_attached(model)


def test_is_attached_by_an_output_alone() -> None:
    model = plain(OuterAdds)
    place = Place(None, None, ())
    attach(model, [attachment(module="embed", place=place, output=True, anchors=(), readers=())], key_norm=True)
    assert is_attached(model)


def test_copies_read_with_their_own_parameters() -> None:
    model = attached()
    before = model(X)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(X), before)
        with torch.no_grad():
            twin.attnres[0].query.mul_(2)
        assert not torch.allclose(twin(X), before)
        assert torch.equal(model(X), before)


def test_saved_whole_and_as_state() -> None:
    model = attached()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(X), model(X))
    fresh = attached()
    fresh.attnres[0].reset_parameters()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(X), model(X))


def test_user_hooks_come_after_the_stream() -> None:
    """A pre-hook that adds to a layer's input pushes; one that reads gets the mix."""
    model = plain()
    model.layers[1].register_forward_pre_hook(lambda m, args: (args[0] + 1.0,))
    model.layers[1].register_forward_hook(lambda m, args, out: out * 1.5)
    expected_output = model(X)
    attach(model, [attachment(anchors=(("layers.0", (0,)),))], key_norm=True)
    assert_close(model(X), expected_output)


class Checkpointed(Net):
    reentrant = True

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def test_reentrant_checkpointing_is_refused() -> None:
    model = attached(Checkpointed)
    with pytest.raises(RefusedError, match="use_reentrant=False"):
        model(X)
    model.reentrant = False
    assert_close(model(X), expected(model))
    (gradient,) = torch.autograd.grad(model(X).sum(), [model.attnres[0].query])
    assert gradient.any()


class Pair(NamedTuple):
    first: Any
    second: Any


def test_places_in_containers() -> None:
    a, b = random(2), random(3)
    value = {"x": [a, None, (1, b)], "pair": Pair("s", a)}
    found = places(value)
    assert [(path, tensor is a) for path, tensor in found] == [
        (("x", 0), True),
        (("x", 2, 1), False),
        (("pair", 1), True),
    ]
    for path, tensor in found:
        assert at_path(value, path) is tensor
    for path in (("y",), ("x", 9), ("x", "0"), ("x", 0, 0)):
        assert at_path(value, path) is None


def test_places_of_arguments() -> None:
    class Call(nn.Module):
        def forward(self, x: Any, mask: Any = None, *rest: Any, scale: Any = None, **more: Any) -> None:
            pass

    a, b, c, d = (random(i + 1) for i in range(4))
    found = argument_places(Call(), (a, None, b), {"scale": c, "extra": [d]})
    assert [place for place, _ in found] == [
        Place("x", 0, ()),
        Place(None, 2, ()),
        Place("scale", None, ()),
        Place("extra", None, (0,)),
    ]
    assert [tensor for _, tensor in found] == [a, b, c, d]
    assert argument_places(Call(), (), {"mask": a})[0][0] == Place("mask", 1, ())
