"""The log of a training: CSV, scalars, and transformers' callback."""

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from attnres_compile.analysis import DepthLogger
from tests.integration.models import example, pair, transformed


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Scalars:
    def __init__(self) -> None:
        self.found: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.found[tag, global_step] = scalar_value


def test_rows_and_scalars(tmp_path: Path) -> None:
    path, scalars = tmp_path / "depth.csv", Scalars()
    logger = DepthLogger(path, example("nanogpt"), every=2, writer=scalars)
    measurements = [logger(transformed("nanogpt"), step) for step in range(3)]
    assert measurements[1] is None and measurements[0] == measurements[2] is not None
    (chain,) = measurements[0].chains  # type: ignore[union-attr]
    logged = rows(path)
    assert [(row["step"], row["sublayer"]) for row in logged] == [(s, str(i)) for s in "02" for i in range(1, 7)]
    for row, sublayer in zip(logged, chain.sublayers, strict=False):
        read = sublayer.read
        assert read is not None and row["name"] == sublayer.name
        assert float(row["gradient"]) == pytest.approx(sublayer.gradient)
        assert [float(w) for w in row["weights"].split()] == pytest.approx(read.weights, abs=1e-5)
        tag = f"depth/0/entropy/{int(row['sublayer']):03d} {sublayer.name}"
        assert scalars.found[tag, 2] == pytest.approx(float(row["entropy"]))
    assert len(scalars.found) == 2 * 6 * 6


def test_a_log_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "depth.csv"
    for step in (0, 100):
        DepthLogger(path, example("nanogpt"))(pair("nanogpt")[1], step)
    assert [row["step"] for row in rows(path)] == ["0"] * 6 + ["100"] * 6


def test_callback_of_the_trainer(tmp_path: Path) -> None:
    tokens = example("llama", 4, 9)["input_ids"]
    data: Any = [{"input_ids": row, "labels": row} for row in tokens]
    inputs = {"input_ids": tokens, "labels": tokens}
    trained = []
    for logged in (False, True):
        model = pair("llama")[1]
        logger = DepthLogger(tmp_path / "depth.csv", inputs, every=2)
        arguments = TrainingArguments(
            str(tmp_path), max_steps=3, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, seed=1
        )
        callbacks = [logger.callback()] if logged else []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' and torch's own remarks
            torch.manual_seed(0)
            Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
        trained.append(model.state_dict())
    found = rows(tmp_path / "depth.csv")
    assert sorted({row["step"] for row in found}) == ["0", "2"]
    losses = [float(row["loss"]) for row in found if row["sublayer"] == "1"]
    assert losses[1] < losses[0]
    # looking changes nothing
    assert all(torch.equal(trained[0][key], trained[1][key]) for key in trained[0])
