"""Recognise the norm that a value goes into: the calls that PyTorch has for it, and the forms that models spell out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from attnres_compile.arithmetic import CASTS, operation_name
from attnres_compile.ops.factored import compute_dtype
from attnres_compile.passes import _nodes


@dataclass(frozen=True)
class Norm:
    """An RMSNorm or LayerNorm over the last axis.

    Attributes:
        kind: which of the two, as the operators name it.
        weight: ``[d]``, or None for ones.
        bias: ``[d]``, or None for zeros.
        eps: added to the mean square or variance.
        nodes: what computes it, in order; the last is the result, the others have no user outside but checks.
    """

    kind: Literal["rms", "layer"]
    weight: fx.Node | None
    bias: fx.Node | None
    eps: float
    nodes: tuple[fx.Node, ...]


def norm_of(x: fx.Node) -> Norm | None:
    """The norm that is the only reader of ``x [..., d]``, or None."""
    norm = _called(x) or _spelled_out(x)
    if norm is None:
        return None
    inside = (x, *norm.nodes[:-1])
    return norm if all(user in norm.nodes for node in inside for user in node.users if not is_check(user)) else None


def is_check(node: fx.Node) -> bool:
    """Whether a node only checks what the graph says: exported programs have one in front of every cast."""
    return node.target is torch.ops.aten._assert_tensor_metadata.default


def _called(x: fx.Node) -> Norm | None:
    node = _only_user(x)
    if node is None or node.op != "call_function" or _first(node) is not x:
        return None
    name, width = operation_name(node.target), _width(x)
    names = {"layer_norm": ("weight", "bias", "eps"), "rms_norm": ("weight", "eps")}.get(name)
    if names is None:
        return None
    given: dict[str, Any] = dict(zip(("input", "normalized_shape", *names), node.args, strict=False)) | node.kwargs
    if list(given["normalized_shape"]) != [width]:
        return None
    eps = given.get("eps", 1e-5 if name == "layer_norm" else None)
    if eps is None:
        eps = torch.finfo(compute_dtype(x.meta["val"].dtype)).eps
    return Norm("layer" if name == "layer_norm" else "rms", given.get("weight"), given.get("bias"), eps, (node,))


def _spelled_out(x: fx.Node) -> Norm | None:
    """``x * rsqrt(mean(x^2) + eps)``, with casts around it and a weight or a bias after it."""
    nodes: list[fx.Node] = []
    wanted = x.meta["val"].dtype
    wide = squared = _after_cast(x, nodes)
    cast = next((user for user in x.users if _is_cast(user, x)), None)
    if wide is x and cast is not None:
        # T5 casts for the mean alone.
        squared = cast
        nodes.append(cast)
    # In fp64 a cast to fp32 is part of what the model computes.
    if squared.meta["val"].dtype not in (wanted, compute_dtype(wanted)):
        return None
    square = next((user for user in squared.users if _is_square(user, squared)), None)
    mean = _only_user(square)
    if square is None or mean is None or not _is_mean(mean):
        return None
    shifted = _only_user(mean)
    eps = _added_number(shifted, mean)
    inverse = _only_user(shifted)
    if shifted is None or eps is None or inverse is None or not _is_inverse_root(inverse):
        return None
    result = _only_user(inverse)
    if result is None or _name(result) != "mul" or {*result.args} != {wide, inverse}:
        return None
    nodes += [square, mean, shifted, inverse, result]
    result = _after_cast(result, nodes, wanted)
    weight, result = _with_vector("mul", result, nodes, x)
    bias, result = _with_vector("add", result, nodes, x)
    _after_cast(result, nodes, wanted)
    return Norm("rms", weight, bias, eps, tuple(nodes))


def _after_cast(x: fx.Node, nodes: list[fx.Node], dtype: torch.dtype | None = None) -> fx.Node:
    """What ``x`` is cast to, if that is all that happens to it (and is of this dtype)."""
    user = _only_user(x)
    if user is None or not _is_cast(user, x) or dtype not in (None, user.meta["val"].dtype):
        return x
    nodes.append(user)
    return user


def _is_cast(node: fx.Node, x: fx.Node) -> bool:
    if _name(node) not in CASTS or _first(node) is not x or not _nodes.is_float(node):
        return False
    return bool(node.meta["val"].device == x.meta["val"].device)


def _with_vector(name: str, x: fx.Node, nodes: list[fx.Node], source: fx.Node) -> tuple[fx.Node | None, fx.Node]:
    """The vector ``[d]`` that ``x`` is multiplied with or that is added to it, and the result."""
    user = _only_user(x)
    if user is None or _name(user) != name or len(user.args) != 2 or user.kwargs:
        return None, x
    vector = user.args[1] if user.args[0] is x else user.args[0]
    value = _nodes.value(vector)
    if not isinstance(vector, fx.Node) or not isinstance(value, torch.Tensor) or value.shape != (_width(source),):
        return None, x
    nodes.append(user)
    return vector, user


def _is_square(node: fx.Node, x: fx.Node) -> bool:
    name = _name(node)
    return (name == "pow" and node.args == (x, 2)) or name == "square" or (name == "mul" and node.args == (x, x))


def _is_mean(node: fx.Node) -> bool:
    if _name(node) != "mean":
        return False
    given = dict(zip(("input", "dim", "keepdim"), node.args, strict=False)) | node.kwargs
    return given.get("dim") in (-1, [-1], (-1,)) and given.get("keepdim") is True and given.get("dtype") is None


def _added_number(node: fx.Node | None, x: fx.Node) -> float | None:
    if node is None or _name(node) != "add" or len(node.args) != 2 or node.kwargs:
        return None
    number = node.args[1] if node.args[0] is x else node.args[0]
    value = _nodes.value(number)
    # Dynamo makes a number of the model an input; the operators take constants, so a guard is due.
    return float(value) if isinstance(value, int | float | torch.SymFloat) else None


def _is_inverse_root(node: fx.Node) -> bool:
    name = _name(node)
    power = node.args[1] if name == "pow" else None
    return name == "rsqrt" or (isinstance(power, float) and math.isclose(power, -0.5))


def _only_user(node: fx.Node | None) -> fx.Node | None:
    """The one that reads a value; checks and ``y.type_as(x)`` ask ``x`` for its dtype alone."""
    users = [] if node is None else [u for u in node.users if not is_check(u)]
    users = [u for u in users if _name(u) != "type_as" or _first(u) is node]
    return users[0] if len(users) == 1 and users[0].op != "output" else None


def _first(node: fx.Node) -> Any:
    return node.args[0] if node.args else node.kwargs.get("input")


def _name(node: fx.Node) -> str:
    return operation_name(node.target) if node.op in ("call_function", "call_method") else node.op


def _width(node: fx.Node) -> int:
    return int(node.meta["val"].shape[-1])
