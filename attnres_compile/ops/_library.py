"""What the operators share: the library they are defined in, the key vector, and the kernels for a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from attnres_compile.ops import cpu, factored, triton

P = ParamSpec("P")
R = TypeVar("R")

NAMESPACE = "attnres_compile"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
# Each operator as it is in Python, for what a compiled kernel of the same name does not take.
IN_PYTHON = torch.library.Library(f"{NAMESPACE}_python", "DEF")
# Per operator what it computes, in PyTorch's own operators when the tensors are fake.
IMPLEMENTATIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator by its schema, with one implementation for all devices and one for shapes."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, _without_autocast(implementation), "CompositeExplicitAutograd")
    _define_in_python(schema, implementation)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    IMPLEMENTATIONS[getattr(torch.ops.attnres_compile, name).default] = implementation


def _define_in_python(schema: str, implementation: Callable[..., Any]) -> None:
    """The twin in `IN_PYTHON`; of a list and a tensor it makes one list, since C++ gets nothing else in one piece."""
    arguments, _, results = schema.rpartition(" -> ")
    function = implementation
    if "Tensor[]" in results:
        results = "Tensor[]"

        @wraps(implementation)
        def function(*args: Any) -> list[Tensor]:
            grads, last = implementation(*args)
            return [*grads, last]

    IN_PYTHON.define(f"{arguments} -> {results}")
    IN_PYTHON.impl(schema.partition("(")[0], _without_autocast(function), "CompositeExplicitAutograd")


def differentiate(name: str, setup_context: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Give an operator its autograd."""
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=LIBRARY)


def kernels(tensor: Tensor) -> Any:
    """The functions of ``factored``, or faster ones with the same signatures, for the device of ``tensor``."""
    if isinstance(tensor, FakeTensor):
        return factored
    return {"cpu": cpu, "cuda": triton}.get(tensor.device.type, factored)


def _without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` outside autocast: a kernel sits below autocast's dispatch key but inherits its state."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return call


def key_vector(query: Tensor, key_norm: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``g * w`` in ``dtype``: only this product of key-norm weight and pseudo-query reaches the logits."""
    w = query.to(dtype)
    return w if key_norm is None else w * key_norm.to(dtype)


def split_key_gradient(grad: Tensor, query: Tensor, key_norm: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of the pseudo-query and of the key-norm weight from that of their product."""
    if key_norm is None:
        return grad.to(query.dtype), None
    return (grad * key_norm).to(query.dtype), (grad * query).to(key_norm.dtype)


def once(name: str) -> None:
    """Let a second derivative through ``name``, an operator that computes a first one, end in an error."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"{NAMESPACE}::{name} has no derivative: second derivatives through depth attention are not supported"
        )

    differentiate(name, lambda ctx, inputs, output: None, backward)
