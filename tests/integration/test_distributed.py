"""Data parallel and fully sharded training on two processes equals training on one."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import multiprocessing

from tests.integration.distributed_worker import PROCESSES, SCENARIOS, Found, made, step, work
from tests.integration.models import assert_same_gradients, attnres_parameters
from tests.tolerances import assert_close

# one worker of a parallel test run starts the processes, once
pytestmark = pytest.mark.xdist_group("distributed")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("distributed")
    multiprocessing.spawn(work, args=(str(folder),), nprocs=PROCESSES)  # type: ignore[attr-defined, no-untyped-call]
    return torch.load(folder / "found.pt")


@cache
def alone(name: str) -> Found:
    torch.set_num_threads(1)
    return step(name, made(name, False), None)


@pytest.mark.parametrize("label", SCENARIOS)
def test_two_processes_equal_one(found: Any, label: str) -> None:
    actual, name = found[label], label.split()[1]
    assert not isinstance(actual, str), actual
    expected = alone(name)
    for number in range(2):
        assert_close(actual[f"outputs {number}"], expected[f"outputs {number}"], f"outputs of step {number}")
        assert_same_gradients(actual[f"gradients {number}"], expected[f"gradients {number}"])
        assert attnres_parameters(made(name, False)).keys() <= actual[f"gradients {number}"].keys()
    assert (actual["outputs 1"] - actual["outputs 0"]).abs().max() > 1e-3
    if label.startswith("fsdp"):
        assert actual["sharded"] and actual["state"]
