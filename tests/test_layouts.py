"""Reads are stored as the sum is."""

import pytest
import torch
from torch import Tensor

from attnres_compile.layouts import storage_order, stored_as_sum

LAYOUTS = {
    "contiguous": lambda x: x,
    "tokens first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "features outermost": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "broadcast": lambda x: x[:1, :1, :1, :1].expand(x.shape),
    "every other": lambda x: torch.stack([x, x], -1)[..., 0],
    "no batch": lambda x: x[:1],
}


def value(layout: str) -> Tensor:
    return LAYOUTS[layout](torch.arange(120.0).view(2, 3, 4, 5))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "broadcast"])
def test_order_is_that_of_a_sum(layout: str) -> None:
    term = value(layout)
    total = term + torch.ones(term.shape)
    order = storage_order([term])
    assert total.permute(order).is_contiguous()


@pytest.mark.parametrize("second", LAYOUTS)
def test_a_broadcast_does_not_decide(second: str) -> None:
    if second == "no batch":
        second = "contiguous"
    total = value("broadcast") + value(second)
    assert total.permute(storage_order([value("broadcast"), value(second)])).is_contiguous()


@pytest.mark.parametrize("axis", [-1, -2, -3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mix_is_stored_as_the_sum(layout: str, axis: int) -> None:
    term = value(layout)
    total = term * 1.0 if layout != "broadcast" else term.contiguous()
    mix = stored_as_sum(term.movedim(axis, -1).contiguous(), [term], axis)
    assert torch.equal(mix, term)
    sizes = [i for i, n in enumerate(term.shape) if n > 1]
    assert [mix.stride(i) for i in sizes] == [total.stride(i) for i in sizes]


def test_nothing_is_done_where_nothing_is_to_do() -> None:
    x = value("contiguous")
    assert stored_as_sum(x, [x], -1) is x
