"""Measurements during training, as CSV and as TensorBoard scalars."""

from __future__ import annotations

import csv
import importlib
import os
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from attnres_compile.analysis.measure import Loss, Measurement, measure
from attnres_compile.errors import MissingDependencyError

COLUMNS = ("step", "loss", "chain", "sublayer", "name", "output", "state", "gradient")
READ_COLUMNS = ("entropy", "embedding", "magnitude", "weights")


class Writer(Protocol):
    """What is needed of a ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Record one number."""


class DepthLogger:
    """Measures a transformed model every so many steps, on the same inputs.

    The CSV has a row per step and sublayer: magnitudes of its output and of the state after it, the loss' gradient by
    its output, and the read of that state (entropy, attention to the embedding, magnitude, and the weights of all
    sources, separated by spaces). Rows are added to a file that is there.

    In a loop call it with the model and the step; for transformers' Trainer pass ``logger.callback()``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        example_inputs: Any,
        *,
        every: int = 100,
        writer: Writer | None = None,
        loss: Loss | None = None,
    ) -> None:
        """Log into a file.

        Args:
            path: of the CSV.
            example_inputs: what the model is measured on, as for ``measure``.
            every: steps between two measurements; the first is at step 0, or the first multiple that is seen.
            writer: a TensorBoard writer, for the same numbers as scalars ``depth/<chain>/<what>/<sublayer>``.
            loss: as for ``measure``.
        """
        self.path, self.example_inputs, self.every = Path(path), example_inputs, every
        self.writer, self.loss = writer, loss

    def __call__(self, model: nn.Module, step: int) -> Measurement | None:
        """Measure and log, if it is time; the measurement is returned."""
        if step % self.every:
            return None
        measurement = measure(model, self.example_inputs, loss=self.loss)
        rows = _rows(measurement, step)
        new = not self.path.exists()
        with self.path.open("a", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, (*COLUMNS, *READ_COLUMNS))
            if new:
                table.writeheader()
            table.writerows(rows)
        if self.writer is not None:
            for row in rows:
                for name in ("output", "state", "gradient", *READ_COLUMNS[:-1]):
                    if name in row:
                        tag = f"depth/{row['chain']}/{name}/{row['sublayer']:03d} {row['name']}"
                        self.writer.add_scalar(tag, row[name], step)
        return measurement

    def callback(self) -> Any:
        """A ``transformers.TrainerCallback`` that calls this at the start and after each step, on the first process.

        With FSDP no process can run the model by itself: call ``measure`` on all of them instead.

        Raises:
            MissingDependencyError: transformers is not installed.
        """
        try:
            base: Any = importlib.import_module("transformers").TrainerCallback
        except ImportError as error:
            raise MissingDependencyError("a callback needs transformers: pip install 'attnres-compile[hf]'") from error
        logger = self

        class DepthCallback(base):  # type: ignore[misc]
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == 0:
                    self.on_step_end(args, state, control, **kwargs)

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.is_world_process_zero:
                    logger(kwargs["model"], state.global_step)

        return DepthCallback()


def _rows(measurement: Measurement, step: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for index, chain in enumerate(measurement.chains):
        for number, sublayer in enumerate(chain.sublayers, 1):
            row: dict[str, Any] = {"step": step, "loss": measurement.loss, "chain": index, "sublayer": number}
            row |= {name: getattr(sublayer, name) for name in ("name", "output", "state", "gradient")}
            if (read := sublayer.read) is not None:
                weights = " ".join(f"{weight:.6g}" for weight in read.weights)
                row |= zip(READ_COLUMNS, (read.entropy, read.weights[0], read.magnitude, weights), strict=True)
            rows.append(row)
    return rows
