"""Data parallel and fully sharded training on two processes equals training on one."""

from functools import cache
from pathlib import Path

import torch
from torch import multiprocessing

from tests.integration.distributed_worker import PROCESSES, READS_ALONE, SCENARIOS, Found, made, step, work
from tests.integration.models import KEY_NORM, QUERY, assert_same_gradients
from tests.tolerances import assert_close


@cache
def alone(name: str, reads: bool) -> Found:
    return step(name, made(name, READS_ALONE if reads else "everything"), None)


def compare(actual: Found | str, expected: Found) -> None:
    assert not isinstance(actual, str), actual
    for number in range(2):
        assert_close(actual[f"outputs {number}"], expected[f"outputs {number}"], f"outputs of step {number}")
        assert_same_gradients(actual[f"gradients {number}"], expected[f"gradients {number}"])
        assert actual[f"gradients {number}"].keys() >= {QUERY, KEY_NORM}
    assert (actual["outputs 1"] - actual["outputs 0"]).abs().max() > 1e-3
    assert actual.get("sharded", True) and actual.get("state", True)


def test_two_processes_equal_one(tmp_path: Path) -> None:
    """One test, for the processes take long to start."""
    multiprocessing.spawn(work, args=(str(tmp_path),), nprocs=PROCESSES)  # type: ignore[attr-defined]
    found: dict[str, Found | str] = torch.load(tmp_path / "found.pt")
    assert len(found) == len(SCENARIOS)
    failures = []
    for label, actual in found.items():
        _, name, manner = label.split(maxsplit=2)
        expected = alone(name, manner == READS_ALONE)
        if manner == READS_ALONE:
            assert expected["gradients 0"].keys() == {QUERY, KEY_NORM}
        try:
            compare(actual, expected)
        except AssertionError as error:
            failures.append(f"{label}: {error}")
    assert not failures, "\n".join(failures)
