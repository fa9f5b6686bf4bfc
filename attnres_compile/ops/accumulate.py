"""``attnres_compile::accumulate``: an addition that no compiler puts off to fuse it with later ones."""

from __future__ import annotations

import torch
from torch import Tensor

from attnres_compile.ops._library import define


def accumulate(total: Tensor, grad: Tensor) -> Tensor:
    """The sum of two gradients of a source, here and now: what is put off keeps both of them until then.

    Args:
        total: the sum so far, ``[..., d]``.
        grad: another, of the same shape and dtype.

    Returns:
        ``total + grad``.
    """
    result: Tensor = torch.ops.attnres_compile.accumulate(total, grad)
    return result


def _fake(total: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(total)


define("accumulate(Tensor total, Tensor grad) -> Tensor", torch.add, _fake)
