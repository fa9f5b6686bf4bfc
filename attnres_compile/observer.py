"""See what happens to the residual streams of a model, from inside the stream's own arithmetic."""

from __future__ import annotations

from typing import Any

import torch

from attnres_compile.chains import BlockPlan


class Observer:
    """Collects what happens to the streams while it is set: pushes per chain, rows read, dtypes pushed.

    A subclass sees the tensors, too.
    """

    active: Observer | None = None

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.pushes: dict[int, int] = {}
        self.rows: set[tuple[int, int]] = set()
        self.dtypes: set[torch.dtype] = set()

    def __enter__(self) -> Observer:
        Observer.active = self
        return self

    def __exit__(self, *_: object) -> None:
        Observer.active = None

    def pushed(self, plan: BlockPlan, position: int, branch: Any, dtype: torch.dtype, partial: Any) -> None:
        """The state at ``position`` has ``branch`` added, of that dtype; its open block's sum is now ``partial``."""
        self.pushes[plan.chain] = self.pushes.get(plan.chain, 0) + 1
        self.dtypes.add(dtype)

    def reads(self, stream: Any, row: int) -> None:
        """A state is read with the parameters of ``row``."""
        self.rows.add((stream.plan.chain, row))
