"""What passes ask of a node: its shape, the module calls around it, and its line in the user's source."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from attnres_compile.arithmetic import changed_in_place, operation_name

WEIGHT_OPS = frozenset(
    {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d", "convolution"}
    | {"conv_transpose1d", "conv_transpose2d", "scaled_dot_product_attention", "multi_head_attention_forward"}
    | {"grouped_mm", "_grouped_mm", "_scaled_mm", "bilinear", "lstm", "gru", "native_multi_head_attention", "mv"}
)


class Call(NamedTuple):
    """One call of a module: ``key`` tells the visits of a shared module apart."""

    key: str
    path: str
    kind: str


def calls(node: fx.Node) -> tuple[Call, ...]:
    """The module calls around a node, outermost first; empty for inputs, parameters and the output."""
    if node.op in ("placeholder", "get_attr", "output"):
        return ()
    stack = node.meta.get("nn_module_stack") or {}
    found = []
    for key, value in stack.items():
        path, kind = value if isinstance(value, tuple) else (str(value), "")
        path = re.sub(r"^(L(\['\w+'\])(\[\d+\])*|L__self__|_export_root)\.?", "", str(path))
        name = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
        found.append(Call(str(key), path, name))
    if not found or found[0].path:
        found.insert(0, Call("", "", ""))
    return tuple(found)


def value(node: Any) -> Any | None:
    """The fake tensor (or number) that a node stands for."""
    return node.meta.get("val", node.meta.get("example_value")) if isinstance(node, fx.Node) else node


def shape(node: Any) -> tuple[int, ...] | None:
    """Shape of a node's tensor with symbolic sizes replaced by their hints, None for anything else."""
    found = value(node)
    return hints(found.shape) if isinstance(found, torch.Tensor) else None


def hints(sizes: Iterable[Any]) -> tuple[int, ...]:
    """Sizes, of symbolic ones the value that they had in the trace; where data decide it, their expression."""
    return tuple(_hint(n) if isinstance(n, torch.SymInt) else n for n in sizes)


def _hint(size: torch.SymInt) -> Any:
    return int(size.node.hint) if size.node.has_hint() else size.node.expr


def memory(node: Any) -> int | None:
    """What the tensors that share their memory have in common, None for anything else."""
    found = value(node)
    if not isinstance(found, torch.Tensor) or not torch._C._has_storage(found):
        return None
    return found.untyped_storage()._cdata


def changed(node: fx.Node, owner: nn.Module) -> fx.Node | None:
    """The node that a call changes in place."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return None
    module = owner.get_submodule(str(node.target)) if node.op == "call_module" else None
    kwargs = {**node.kwargs, "inplace": True} if getattr(module, "inplace", False) is True else node.kwargs
    found = changed_in_place(name_of(node, owner), node.args, kwargs)
    return found if isinstance(found, fx.Node) else None


def is_float(node: Any) -> bool:
    """Whether a node is a floating-point tensor."""
    found = value(node)
    return isinstance(found, torch.Tensor) and found.is_floating_point()


def name_of(node: fx.Node, owner: nn.Module) -> str:
    """Operation name of a node; a called leaf module that passes values on is named after what it does."""
    if node.op in ("call_function", "call_method"):
        return operation_name(node.target)
    if node.op != "call_module":
        return node.op
    module = owner.get_submodule(str(node.target))
    if isinstance(module, nn.Identity) or (isinstance(module, nn.Dropout) and not module.training):
        return "alias"
    return type(module).__name__


def has_weight(node: fx.Node, owner: nn.Module) -> bool:
    """Whether a node mixes features: a matrix product, a convolution, attention, or a leaf with parameters."""
    if node.op == "call_module":
        return any(True for _ in owner.get_submodule(str(node.target)).parameters())
    return name_of(node, owner) in WEIGHT_OPS or isinstance(node.target, torch._ops.HigherOrderOperator)


def location(node: fx.Node) -> str:
    """``file:line: code`` of the innermost frame outside torch, or a word that it is unknown."""
    line = line_of(node.meta.get("stack_trace") or "")
    path = calls(node)[-1].path if not line and calls(node) else ""
    return line or (f"in module {path!r}" if path else "source line unknown")


def line_of(stack_trace: str) -> str:
    """``file:line: code`` of the innermost frame outside torch, empty without frames."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n?\s*([^\n]*)', stack_trace)
    ours = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    if not ours:
        return ""
    file, line, code = ours[-1]
    return f"{file}:{line}: {code.strip()}"
