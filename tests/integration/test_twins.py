"""A model and its transformed twins in one process, compiled."""

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import attnres_compile as ac
from attnres_compile.attach import guard_hooks
from attnres_compile.backends import AttnResBackend
from tests.integration.models import Graphs, randomise
from tests.programs.parts import Net
from tests.tolerances import assert_close, relative_error
from tests.zoo import noise, seeded

# Dynamo asks each tensor that enters a compiled frame for its gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture
def unguarded() -> Iterator[None]:
    """As a process is that has not met this library's hooks yet."""
    torch._dynamo.config.skip_nnmodule_hook_guards = True
    yield
    guard_hooks()


def loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("forwards", [True, False])
def test_twins(forwards: bool) -> None:
    """Dynamo's code belongs to the class: what it made for one must not run for another."""
    original, x = seeded(lambda: Net(1)), noise(2, 7, 5)
    models = [original, *(ac.transform(original, x, num_blocks=blocks, verify="off") for blocks in (1, 2))]
    models += [loaded(models[1]), copy.deepcopy(models[2])]
    for seed, model in enumerate(models):
        randomise(model, seed)
    backend = AttnResBackend(ac.AttnResConfig(num_blocks=2), inner=Graphs())
    outputs = []
    for model in models if forwards else models[::-1]:
        outputs.append(torch.compile(model, backend=backend)(x))
        assert_close(outputs[-1], model(x))
    # Once all are there, none is taken for another.
    for model in models:
        assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert all(relative_error(a, b) > 1e-4 for i, a in enumerate(outputs) for b in outputs[:i])


@pytest.mark.parametrize("pickled", [False, True])
def test_a_twin_after_the_original(pickled: bool, request: pytest.FixtureRequest) -> None:
    original, x = seeded(lambda: Net(1)), noise(2, 7, 5)
    file = io.BytesIO()
    torch.save(ac.transform(original, x, num_blocks=2, verify="off"), file)
    file.seek(0)
    request.getfixturevalue("unguarded")
    backend = AttnResBackend(ac.AttnResConfig(num_blocks=2), inner=Graphs())
    assert_close(torch.compile(original, backend=backend)(x), original(x))
    twin = torch.load(file, weights_only=False) if pickled else ac.transform(original, x, num_blocks=2, verify="off")
    assert not torch._dynamo.config.skip_nnmodule_hook_guards
    randomise(twin)
    assert relative_error(twin(x), original(x)) > 1e-3
    assert_close(torch.compile(twin, backend=backend)(x), twin(x))
    assert_close(torch.compile(original, backend=backend)(x), original(x))
