"""Fold the key norm of frozen reads into their pseudo-queries: only the product of the two reaches the logits.

Before::

    %q = select(%attnres_0_query, 0, 3)    %k = select(%attnres_0_key_norm, 0, 3)
    %h = depth_attention([%b0, %b1], %q, %k, eps, 2.0)

After::

    %key = get_attr(_attnres_key_0)
    %h   = depth_attention([%b0, %b1], %key, None, eps, 2.0)

Assumes that a parameter which wants no gradient stays as it is: the product is a constant from here on. Leaves reads
whose vectors are inputs of the graph, want a gradient, or are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode

from attnres_compile.passes._emit import STAMP
from attnres_compile.passes.base import Subject

aten = torch.ops.aten
ops = torch.ops.attnres_compile

NAME = "fold_key_norm"
# Where the query is among the arguments; the key norm follows it.
QUERIES = {
    ops.depth_attention.default: 1,
    ops.inter_block.default: 1,
    ops.merge.default: 4,
    ops.merge_norm.default: 5,
    ops.add_merge_norm.default: 6,
}
ROWS = (aten.select.int, aten.slice.Tensor, aten.stack.default)


@dataclass(frozen=True)
class FoldKeyNorm:
    """Pass: see the module's text."""

    def __call__(self, subject: Subject) -> bool:
        """Fold what is frozen; reads of the same row share the constant."""
        module = subject.module
        folded: dict[tuple[Any, Any], fx.Node] = {}
        modified = False
        for node in list(module.graph.nodes):
            at = QUERIES.get(node.target)
            if at is None:
                continue
            query, key_norm = node.args[at : at + 2]
            vectors = [_frozen(module, vector) for vector in (query, key_norm)]
            if any(vector is None for vector in vectors):
                continue
            key = _identity(query), _identity(key_norm)
            if key not in folded:
                folded[key] = _constant(module, node, vectors)
            node.update_arg(at, folded[key])
            node.update_arg(at + 1, None)
            modified = True
        if modified:
            subject.edited = True
        return modified


def _frozen(module: fx.GraphModule, node: Any) -> Tensor | None:
    """The value of a parameter that wants no gradient, or of rows of one."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "get_attr":
        path, _, name = str(node.target).rpartition(".")
        found = getattr(module.get_submodule(path), name)
        return None if found.requires_grad else found.detach()
    if node.target not in ROWS:
        return None
    args = fx.node.map_arg(node.args, lambda n: _frozen(module, n))
    inputs = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    return None if any(value is None for value in inputs) else node.target(*args)


def _identity(node: Any) -> Any:
    """Equal for nodes that select the same rows of the same parameter."""
    if not isinstance(node, fx.Node):
        return tuple(map(_identity, node)) if isinstance(node, list | tuple) else node
    return node.target if node.op == "get_attr" else (node.target, *map(_identity, node.args))


def _constant(module: fx.GraphModule, before: fx.Node, vectors: list[Any]) -> fx.Node:
    query, key_norm = vectors
    wide = torch.promote_types(query.dtype, torch.float32)
    name = next(name for i in range(len(module._buffers) + 1) if not hasattr(module, name := f"_attnres_key_{i}"))
    module.register_buffer(name, (query.to(wide) * key_norm.to(wide)), persistent=False)
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    with module.graph.inserting_before(first):
        node = module.graph.get_attr(name)
    mode = detect_fake_mode(before.meta["val"])
    buffer = module.get_buffer(name)
    node.meta |= {"val": buffer if mode is None else mode.from_tensor(buffer, static_shapes=True), STAMP: NAME}
    return node
