"""Example inputs in every form, dynamic axes by default, and the same call at other sizes."""

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attnres_compile.errors import InputError
from attnres_compile.exporters.example_call import (
    ExampleCall,
    axis_names,
    dynamic_shapes_of,
    enlarged,
    evaluated,
    example_call,
    named_tensors,
    other_sizes,
    without_names,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids: Tensor, mask: Tensor | None = None, use_cache: bool = True) -> Tensor:
        hidden: Tensor = self.dropout(self.embedding(ids)) + float(use_cache)
        return hidden if mask is None else hidden * mask.unsqueeze(-1)


class Nested(nn.Module):
    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], **named: Tensor) -> Tensor:
        return x + pair[0] + pair[1].sum() + named["z"].sum()


IDS, MASK = torch.arange(10).view(2, 5), torch.ones(2, 5, dtype=torch.bool)


def program_of(call: ExampleCall, shapes: dict[str, Any]) -> torch.export.ExportedProgram:
    return torch.export.export(call.module, call.args, call.kwargs, dynamic_shapes=without_names(shapes), strict=False)


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        (IDS, 1, ["use_cache"]),
        ((IDS, MASK), 2, ["use_cache"]),
        ([IDS], 1, ["use_cache"]),
        ({"mask": MASK, "ids": IDS}, 0, ["ids", "mask", "use_cache"]),
        ({"ids": IDS, "use_cache": True}, 0, ["ids", "use_cache"]),
    ],
)
def test_forms_of_inputs(inputs: Any, args: int, kwargs: list[str]) -> None:
    call = example_call(Model(), inputs)
    assert len(call.args) == args
    assert list(call.kwargs) == kwargs
    assert call.kwargs["use_cache"] == (isinstance(inputs, dict) and "use_cache" in inputs)
    assert call.tensors()[0] is IDS


def test_inputs_made_from_a_config() -> None:
    class WithConfig(nn.Module):
        config = SimpleNamespace(vocab_size=11)
        main_input_name = "input_ids"

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 8)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.embedding(input_ids)

    call = example_call(WithConfig(), None)
    assert list(call.kwargs) == ["input_ids"]
    assert call.outputs()[0][1].shape == (*call.tensors()[0].shape, 8)


@pytest.mark.parametrize("inputs", [None, 3, {"tokens": IDS}, (IDS, MASK, True, 4)])
def test_inputs_that_do_not_fit(inputs: Any) -> None:
    with pytest.raises(InputError):
        example_call(Model(), inputs)


def test_names_of_outputs() -> None:
    @dataclass
    class Result:
        logits: Tensor
        states: tuple[Tensor, ...]
        loss: None = None

    pair = namedtuple("pair", ["a", "b"])
    x = torch.zeros(1)
    results: list[Any] = [x, (x, None, [x]), {"y": x}, Result(x, (x, x)), pair(x, 1)]
    names = [[name for name, _ in named_tensors(result)] for result in results]
    assert names == [["output"], ["output_0", "output_2_0"], ["y"], ["logits", "states_0", "states_1"], ["a"]]
    with pytest.raises(InputError, match="holds a set"):
        named_tensors({"y": {x}})


def test_default_axes() -> None:
    call = example_call(Model(), {"mask": MASK, "ids": IDS})
    both = {0: "batch", 1: "sequence"}
    assert dynamic_shapes_of(call, None) == {"ids": both, "mask": both, "use_cache": None}
    other_length, row = torch.zeros(2, 7, dtype=torch.int32), torch.zeros(1, 5, dtype=torch.int32)
    nested = example_call(Nested(), ((torch.zeros(2, 5), (row, other_length))), None)
    nested = ExampleCall(nested.module, nested.args, {"z": torch.zeros(2, 3, 4)})
    assert dynamic_shapes_of(nested, None) == {
        "x": {0: "batch"},
        "pair": (None, {0: "batch", 1: "sequence"}),
        "named": {"z": {0: "batch"}},
    }


def test_given_axes_are_completed() -> None:
    call = example_call(Model(), (IDS, MASK))
    assert dynamic_shapes_of(call, {}) == {"ids": None, "mask": None, "use_cache": None}
    assert dynamic_shapes_of(call, {"mask": {0: "b"}}) == {"ids": None, "mask": {0: "b"}, "use_cache": None}
    assert dynamic_shapes_of(call, ({0: "b"}, None)) == {"ids": {0: "b"}, "mask": None, "use_cache": None}


def test_an_axis_of_one_is_enlarged_for_the_capture() -> None:
    call = example_call(Model(), (IDS[:1, :1], MASK[:1, :1]))
    shapes = {"ids": {0: "batch"}, "mask": (Dim("batch"), None), "use_cache": None}
    assert [t.shape for t in enlarged(call, shapes).tensors()] == [(2, 1), (2, 1)]
    fixed = {"ids": {0: 1}, "mask": (Dim.STATIC, None), "use_cache": None}
    assert [t.shape for t in enlarged(call, fixed).tensors()] == [(1, 1), (1, 1)]


def test_names_and_other_sizes() -> None:
    call = example_call(Model().eval(), (IDS, MASK))
    shapes = dynamic_shapes_of(call, None)
    program = program_of(call, shapes)
    assert set(axis_names(program, shapes).values()) == {"batch", "sequence"}
    sizes = [[tuple(t.shape) for t in other.tensors()] for other in other_sizes(program, call)]
    assert sizes == [[(3, 4)] * 2, [(4, 6)] * 2, [(4, 10)] * 2]
    ids = next(other_sizes(program, call)).tensors()[0]
    assert ids.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8], [2, 3, 0, 1]]
    static = dynamic_shapes_of(call, {})
    assert not list(other_sizes(program_of(call, static), call))


def test_other_sizes_keep_to_the_ranges() -> None:
    call = example_call(Model().eval(), (IDS, MASK))
    batch, length = Dim("batch", min=2, max=4), Dim("length", min=5, max=6)
    shapes = {"ids": (batch, length), "mask": (batch, length), "use_cache": None}
    program = program_of(call, shapes)
    assert [tuple(other.tensors()[0].shape) for other in other_sizes(program, call)] == [(3, 6), (4, 6)]


def test_modes_are_restored() -> None:
    model = Model()
    model.dropout.eval()
    with pytest.raises(KeyError), evaluated(model):
        assert not model.training
        raise KeyError
    assert model.training
    assert not model.dropout.training
