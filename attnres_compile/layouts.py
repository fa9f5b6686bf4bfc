"""How tensors are stored. A read is stored as the sum that it stands for would be: the model's code may view it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def storage_order(terms: Sequence[Tensor]) -> list[int]:
    """The axes of a sum as they are stored, the outermost first.

    Args:
        terms: at least one, of one shape. The first that is no broadcast decides, as in an add of PyTorch.
    """
    for term in terms:
        strides = term.stride()
        if term.is_contiguous():
            break
        if all(isinstance(n, int) and (n > 0 or term.shape[i] == 1) for i, n in enumerate(strides)):
            return sorted(range(term.ndim), key=lambda i: -strides[i])
    return list(range(terms[0].ndim))


def stored_as_sum(mix: Any, terms: Sequence[Tensor], axis: int) -> Any:
    """A contiguous ``mix [..., d]`` with its features where ``terms`` have theirs, and stored as their sum is.

    Args:
        mix: a tensor, or a proxy for one.
        terms: as in ``storage_order``.
        axis: of the features of ``terms``, counted from the end.
    """
    order, ndim = storage_order(terms), terms[0].ndim
    now = [i for i in range(ndim) if i != axis + ndim] + [axis + ndim]
    if order == now:
        return mix if axis == -1 else aten.permute.default(mix, _inverse(now))
    mix = aten.contiguous.default(aten.permute.default(mix, [now.index(i) for i in order]))
    return mix if order == sorted(order) else aten.permute.default(mix, _inverse(order))


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(i) for i in range(len(order))]
