"""Transformed models for these tests: each is made once and handed out as copies, with random queries on request."""

import copy
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import attnres_compile as ac
from tests.tolerances import assert_close
from tests.zoo import CASES

# Three layers of two sublayers are three blocks of two: whole blocks, partial sums and both phases all occur.
LAYERS, READS, BLOCKS = 3, 6, 3
# Batch and length, twice, for what has to work at any size.
SHAPES = ((2, 7), (3, 11))
QUERY, KEY_NORM = "attnres.0.query", "attnres.0.key_norm"


@cache
def _made(name: str) -> tuple[Any, Any]:
    original = CASES[name].build(layers=LAYERS)
    return original, ac.transform(original, example(name), num_blocks=BLOCKS, verify="off")


def pair(name: str, *, random: bool = False) -> tuple[Any, Any]:
    """The zoo's model of that name and its transformed twin, which share their parameters."""
    original, model = copy.deepcopy(_made(name))
    if random:
        randomise(model)
    return original, model


def transformed(name: str) -> Any:
    """A transformed model with random queries."""
    return pair(name, random=True)[1]


def example(name: str, batch: int = 2, length: int = 7) -> dict[str, Tensor]:
    return CASES[name].inputs(batch, length)


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Random queries and key norms in every chain, so that a lost row, block or parameter shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in attnres_parameters(model).items():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.copy_(noise * 2 / parameter.shape[-1] ** 0.5 if name.endswith("query") else 1 + 0.3 * noise)


def attnres_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if "attnres." in name}


def without_dropout(model: nn.Module) -> nn.Module:
    """In training mode, but without random numbers."""
    for module in model.modules():
        for attribute in ("p", "attention_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return model.train()


def run(name: str, model: nn.Module, inputs: dict[str, Tensor] | None = None, *, seed: int = 0) -> Tensor:
    """The zoo's output of one forward with the random numbers of a seed."""
    torch.manual_seed(seed)
    return CASES[name].output(model(**(example(name) if inputs is None else inputs)))


def projection(output: Tensor) -> Tensor:
    """A loss that every number of the output takes part in, each with another weight."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    return (output * weights).sum() / output.numel() ** 0.5


def gradients(name: str, model: nn.Module, *, seed: int = 0) -> dict[str, Tensor]:
    """The gradients of one seeded step; parameters without one are left out."""
    model.zero_grad(set_to_none=True)
    projection(run(name, model, seed=seed)).backward()
    found = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """All gradients close, measured against the largest: a bias that hardly matters is all rounding."""
    assert actual.keys() == expected.keys()
    assert_close(_joined(actual.values()), _joined(expected[key] for key in actual), "gradients")
    for key in expected:
        assert bool(actual[key].any()) == bool(expected[key].any()), key


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


class Graphs:
    """A backend that runs Dynamo's graphs as they are and keeps them."""

    def __init__(self) -> None:
        self.found: list[fx.GraphModule] = []

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        self.found.append(module)
        return module.forward


class CountOps(TorchDispatchMode):
    """Counts the calls of this library's operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "attnres_compile":
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))

    @property
    def reads(self) -> int:
        return self.counts.get("depth_attention", 0) + self.counts.get("merge", 0)
