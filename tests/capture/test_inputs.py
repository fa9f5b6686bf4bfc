"""What a user may give as example inputs, what is made from a config, and the second shapes."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnres_compile.capture.inputs import Inputs, moved, normalise, other_shapes
from attnres_compile.errors import InputError
from tests.zoo import CASES, HEADS, VOCAB


class Plain(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = True) -> Tensor:
        return x


class Cached(nn.Module):
    def forward(self, x: Tensor, use_cache: bool | None = None) -> Tensor:
        return x


X, Y = torch.zeros(2, 3), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (X, Inputs((X,), {})),
        ((X, Y), Inputs((X, Y), {})),
        ([X, None, False], Inputs((X, None, False), {})),
        ((), Inputs((), {})),
        ({"x": X, "flag": False}, Inputs((), {"x": X, "flag": False})),
        (OrderedDict(mask=Y, x=X), Inputs((), {"mask": Y, "x": X})),
    ],
)
def test_forms(given: Any, expected: Inputs) -> None:
    found = normalise(Plain(), given)
    assert [id(value) for value in found.args] == [id(value) for value in expected.args]
    assert list(found.kwargs.items()) == list(expected.kwargs.items())


def test_batch_encoding() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"x": X, "mask": Y})
    assert normalise(Plain(), encoding) == Inputs((), {"x": X, "mask": Y})


@pytest.mark.parametrize("given", [3, "text", object(), {1, 2}])
def test_other_types(given: Any) -> None:
    with pytest.raises(InputError, match=rf"example_inputs is a {type(given).__name__}; give a tensor, a tuple"):
        normalise(Plain(), given)


def test_none_without_a_config() -> None:
    with pytest.raises(InputError, match="Plain needs example_inputs"):
        normalise(Plain(), None)


def test_caches_are_left_out() -> None:
    given = {"x": X}
    assert normalise(Cached(), given).kwargs["use_cache"] is False
    assert given == {"x": X}
    assert normalise(Cached(), {"x": X, "use_cache": True}).kwargs["use_cache"] is True
    assert "use_cache" not in normalise(Plain(), X).kwargs


@pytest.mark.parametrize(
    ("config", "passed"), [({"use_cache": True}, True), ({"use_cache": False}, False), ({}, False)]
)
def test_use_cache_among_keywords_that_are_handed_on(config: dict[str, bool], passed: bool) -> None:
    class HandsOn(nn.Module):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            return x

    model: Any = HandsOn()
    assert "use_cache" not in normalise(model, X).kwargs
    model.config = SimpleNamespace(**config)
    assert ("use_cache" in normalise(model, X).kwargs) == passed


def test_fresh_inputs_are_copies() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    inputs = Inputs((x, 1), {"mask": Y})
    (copied, one), kwargs = inputs.fresh()
    assert one == 1
    assert (copied.requires_grad, copied.is_leaf) == (True, True)
    with torch.no_grad():
        copied.zero_()
        kwargs["mask"].zero_()
    assert x.eq(1).all()
    assert Y.eq(1).all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {"input_ids": (2, 9)}),
        ("bert", {"input_ids": (2, 9)}),
        ("t5", {"input_ids": (2, 9), "decoder_input_ids": (2, 9)}),
        ("vit", {"pixel_values": (2, 3, 32, 32)}),
        ("whisper", {"input_features": (2, 16, 32), "decoder_input_ids": (2, 9)}),
        ("clip", {"input_ids": (2, 9), "pixel_values": (2, 3, 32, 32)}),
    ],
)
def test_made_from_a_config(name: str, expected: dict[str, tuple[int, ...]]) -> None:
    model = CASES[name].build(layers=1)
    made = normalise(model, None).kwargs
    made.pop("use_cache", None)
    assert {key: tuple(value.shape) for key, value in made.items()} == expected
    for key, value in made.items():
        if key.endswith("ids"):
            # special tokens have the lowest numbers, and no two neighbours are equal
            assert int(value.min()) >= 3
            assert int(value.max()) < VOCAB
            assert len(value.unique()) > 10
        else:
            assert value.dtype == torch.float32
    with torch.no_grad():
        assert model(**normalise(model, None).kwargs) is not None
    half = normalise(model.to(torch.bfloat16), None).kwargs
    assert {value.dtype for key, value in half.items() if key.startswith(("pixel", "input_f"))} <= {torch.bfloat16}


class Made(nn.Module):
    """Looks like a Hugging Face model."""

    def __init__(self, name: str, **config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.main_input_name, self.config = name, SimpleNamespace(**config)

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        return input_ids


def test_small_vocabularies_and_image_sizes() -> None:
    for vocabulary in (1, 2, 3, 4):
        ids = normalise(Made("input_ids", vocab_size=vocabulary), None).kwargs["input_ids"]
        assert int(ids.min()) >= 0
        assert int(ids.max()) < vocabulary
    made = normalise(Made("pixel_values", image_size=(8, 6), num_channels=1), None).kwargs
    assert tuple(made["pixel_values"].shape) == (2, 1, 8, 6)
    nested = Made(
        "pixel_values", vision_config=SimpleNamespace(image_size=4), text_config=SimpleNamespace(vocab_size=5)
    )
    assert {key: tuple(v.shape) for key, v in normalise(nested, None).kwargs.items()} == {
        "input_ids": (2, 9),
        "pixel_values": (2, 3, 4, 4),
    }


def test_unknown_main_input() -> None:
    with pytest.raises(InputError, match=r"cannot make example inputs for Made \(input_values\)"):
        normalise(Made("input_values"), None)


def test_made_inputs_are_the_same_each_time() -> None:
    model = CASES["vit"].build(layers=1)
    generator = torch.get_rng_state()
    first, second = (normalise(model, None).kwargs["pixel_values"] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), generator)


def shapes(inputs: list[Inputs]) -> list[list[tuple[int, ...]]]:
    return [[tuple(t.shape) for t in (*i.args, *i.kwargs.values()) if isinstance(t, Tensor)] for i in inputs]


def test_second_shapes() -> None:
    x = torch.arange(2 * 9 * HEADS).reshape(2, 9, HEADS).float()
    other, batch = other_shapes(Inputs((x, "text", None), {"mask": x[..., 0] > 3, "scale": torch.tensor(2.0)}))
    assert shapes([other, batch]) == [[(3, 6, HEADS), (3, 6), ()], [(3, 9, HEADS), (3, 9), ()]]
    assert torch.equal(other.args[0][:2], x[:, :6])
    assert torch.equal(other.args[0][2], x[0, :6])
    assert other.args[1:] == ("text", None)
    assert torch.equal(batch.kwargs["mask"][2], x[0, :, 0] > 3)


def test_second_shapes_of_other_inputs() -> None:
    # images: channels are no length
    images = other_shapes(Inputs((torch.zeros(2, 3, 8, 8),), {}))
    assert (3, 3, 8, 8) in [shape for found in shapes(images) for shape in found]
    # one number a sample: only the batch
    assert shapes(other_shapes(Inputs((torch.zeros(4),), {}))) == [[(5,)]]
    # tensors of another first axis stay
    assert shapes(other_shapes(Inputs((torch.zeros(2, 5), torch.zeros(7, 5)), {})))[0] == [(3, 4), (7, 5)]
    assert other_shapes(Inputs((), {"flag": True, "number": torch.tensor(1)})) == []


def test_second_shapes_share_nothing() -> None:
    x = torch.zeros(2, 6)
    for other in other_shapes(Inputs((x,), {})):
        other.args[0].fill_(1)
    assert not x.any()


def test_moved() -> None:
    inputs = Inputs((X, "text"), {"mask": [Y]})
    there = moved(inputs, torch.device("meta"))
    assert there.args[0].device.type == there.kwargs["mask"][0].device.type == "meta"
    assert there.args[1] == "text"
