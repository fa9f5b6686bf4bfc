"""See what happens to the residual streams of a model, from inside the stream's own arithmetic."""

from __future__ import annotations

import sys
from typing import Any

import torch

from attnres_compile.chains import BlockPlan
from attnres_compile.errors import RefusedError


class Observer:
    """Collects what happens to the streams while it is set: pushes per chain, rows read, dtypes, values held.

    A subclass sees the tensors, too.
    """

    active: Observer | None = None

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.pushes: dict[int, int] = {}
        self.rows: set[tuple[int, int]] = set()
        self.dtypes: set[torch.dtype] = set()
        self.held: list[tuple[torch.Tensor, int]] = []
        self.in_place: list[str] = []
        self.handed: list[tuple[torch.Tensor, int, str]] = []

    def hold(self, value: Any) -> None:
        """Note a tensor of the user's that a stream keeps without a copy."""
        if isinstance(value, torch.Tensor) and not value.is_inference():
            self.held.append((value, value._version))

    def given(self, value: Any) -> None:
        """Note a tensor that the user's program gets from a stream."""
        if isinstance(value, torch.Tensor) and not value.is_inference():
            self.handed.append((value, value._version, caller()))

    def refuse_changed(self) -> None:
        """A tensor that a stream keeps must stay as it is.

        Raises:
            RefusedError: one was changed in place while the streams were in use.
        """
        if any(value._version != version for value, version in self.held):
            raise RefusedError(
                "a value that the residual stream keeps (its source, or a branch that was added) was changed in place "
                "afterwards, under another name; write that operation out of place, or on a clone"
            )

    def refuse_in_place(self) -> None:
        """A stream cannot follow a change in place to other names of the same memory that are plain tensors.

        Raises:
            RefusedError: there was such a change; to be called where the outputs differ.
        """
        read = [f"what was read{where}" for value, version, where in self.handed if value._version != version]
        changed = self.in_place + read
        if changed:
            raise RefusedError(
                f"the residual stream, or a tensor that it was added to, is changed in place ({changed[0]}), and its "
                "memory is used afterwards under another name; write that operation out of place, or transform the "
                "exported program, which is made functional"
            )

    def __enter__(self) -> Observer:
        Observer.active = self
        return self

    def __exit__(self, *_: object) -> None:
        Observer.active = None

    def pushed(self, plan: BlockPlan, position: int, branch: Any, dtype: torch.dtype, partial: Any) -> None:
        """The state at ``position`` has ``branch`` added, of that dtype; its open block's sum is now ``partial``."""
        self.pushes[plan.chain] = self.pushes.get(plan.chain, 0) + 1
        self.dtypes.add(dtype)
        if partial is branch:
            self.hold(branch)

    def reads(self, stream: Any, row: int) -> None:
        """A state is read with the parameters of ``row``."""
        self.rows.add((stream.plan.chain, row))


def caller() -> str:
    """Where the user's code did this, as `` at file:line``."""
    if torch.compiler.is_compiling():
        return ""
    frame: Any = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in ("/torch/", "/attnres_compile/")):
        frame = frame.f_back
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
