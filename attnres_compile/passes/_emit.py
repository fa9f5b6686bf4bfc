"""How passes add nodes: with fake values, stamped with the pass and the place in the user's source."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

STAMP = "attnres_compile_pass"
PLACE = ("stack_trace", "nn_module_stack")


def emit(name: str, before: fx.Node, target: Callable[..., Any], *args: Any) -> fx.Node:
    """A call in front of ``before``, whose place in the user's source it takes over."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args)
    stamp(node, name, before)
    return node


def stamp(node: fx.Node, name: str, like: fx.Node | None) -> None:
    """Give a node its fake value, the name of the pass that made it, and the place of the node that it stands for."""
    values = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    modes = [v.fake_mode for v in pytree.tree_leaves(values) if isinstance(v, FakeTensor)]
    function: Any = method(str(node.target)) if node.op == "call_method" else node.target
    with modes[0] if modes else contextlib.nullcontext(), torch.no_grad():
        node.meta["val"] = function(*values[0], **values[1])
    node.meta[STAMP] = name
    for key in PLACE:
        if like is not None and key in like.meta:
            node.meta[key] = like.meta[key]


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let ``new`` take the place of ``old``, which has the same shape and dtype."""
    before, after = old.meta["val"], new.meta["val"]
    assert before.shape == after.shape and before.dtype == after.dtype, (old, before, new, after)
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)
    if any(user.op == "output" for user in new.users):
        new.name = old.name  # the signature of an exported program names its outputs


def method(name: str) -> Callable[..., Any]:
    """A tensor method as a function."""
    return lambda value, *args, **kwargs: getattr(value, name)(*args, **kwargs)
