"""Let the residual add before a merge and the norm after it join the merge.

Before::

    %p2 = add(%p1, %f)
    %h  = merge(%o, %m, %l, %p2, %q, %k, eps, 3.0)
    %y  = rms_norm(%h, [d], %w, norm_eps)

After::

    %p2, %y = add_merge_norm(%p1, %f, [%b0, %b1], %o, %m, %l, %q, %k, %w, None, eps, norm_eps, 3.0, "rms")

Without an add it becomes ``merge_norm``. Assumes first phases of ``inter_block``: the fused operators keep its blocks
for their gradients, and neither the read nor the norm's result. Norms may be calls or spelled out (see ``_norms``).
Leaves a read with more than one reader, a norm that changes the dtype, and an add whose sum is needed before the norm.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from attnres_compile.arithmetic import as_addition, operation_name
from attnres_compile.passes._emit import emit, replace
from attnres_compile.passes._norms import is_check, norm_of
from attnres_compile.passes.base import Subject

aten = torch.ops.aten
ops = torch.ops.attnres_compile

NAME = "fuse_neighbours"


class _Terms(NamedTuple):
    """The two operands of the add before a merge."""

    partial: fx.Node
    branch: fx.Node


@dataclass(frozen=True)
class FuseNeighbours:
    """Pass: see the module's text."""

    def __call__(self, subject: Subject) -> bool:
        """Fuse every merge that a norm alone reads."""
        modified = False
        for merge in list(subject.module.graph.find_nodes(op="call_function", target=ops.merge.default)):
            modified |= _fuse(merge)
        if modified:
            subject.edited = True
        return modified


def _fuse(merge: fx.Node) -> bool:
    o, m, l, partial, query, key_norm, eps, scale = merge.args[:8]
    phase = _phase(o)
    if phase is None:
        return False
    blocks, queries, key_norms, _ = phase.args
    dtype = blocks[0].meta["val"].dtype  # type: ignore[index,union-attr]
    read = _uncast(merge, dtype)
    norm = norm_of(read)
    if norm is None or {read.meta["val"].dtype, norm.nodes[-1].meta["val"].dtype} != {dtype}:
        return False
    last = norm.nodes[-1]
    terms = _terms(partial, merge, last)
    if _writes_between(merge if terms is None else partial, last):  # type: ignore[arg-type]
        return False
    if query is None:
        # A block's first read needs its own row only to recompute the first phase.
        row = o.args[1]  # type: ignore[union-attr]
        query = emit(NAME, last, aten.select.int, queries, 0, row)
        key_norm = None if key_norms is None else emit(NAME, last, aten.select.int, key_norms, 0, row)
    statistics = (list(blocks), o, m, l)  # type: ignore[arg-type]
    options = (query, key_norm, norm.weight, norm.bias, eps, norm.eps, scale, norm.kind)
    if terms is None:
        result = emit(NAME, last, ops.merge_norm.default, *statistics, partial, *options)
    else:
        both = emit(NAME, last, ops.add_merge_norm.default, *terms, *statistics, *options)
        total, result = (emit(NAME, last, operator.getitem, both, i) for i in range(2))
    replace(last, result)
    for node in (*reversed(norm.nodes[:-1]), *([] if read is merge else [read]), merge):
        for check in list(node.users):
            merge.graph.erase_node(check)
        merge.graph.erase_node(node)
    if terms is not None:
        replace(partial, total)  # type: ignore[arg-type]
    return True


def _phase(o: Any) -> fx.Node | None:
    """The ``inter_block`` that ``o`` is a row of, as it came out."""
    rows = o.args[0] if isinstance(o, fx.Node) and o.target is operator.getitem else None
    if not isinstance(rows, fx.Node) or rows.target is not aten.unbind.int or len(rows.args) != 1:
        return None
    whole = rows.args[0]
    phase = whole.args[0] if isinstance(whole, fx.Node) and whole.target is operator.getitem else None
    return phase if isinstance(phase, fx.Node) and phase.target is ops.inter_block.default else None


def _uncast(merge: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The merge, or its cast to the dtype of the stream where there is no partial sum to take the dtype from."""
    users = [user for user in merge.users if not is_check(user)]
    if len(users) != 1 or users[0].target is not aten.to.dtype or merge.meta["val"].dtype == dtype:
        return merge
    return users[0]


def _terms(partial: Any, merge: fx.Node, last: fx.Node) -> _Terms | None:
    """What the partial sum is the sum of, if the sum can be made where the norm's result is."""
    if not isinstance(partial, fx.Node) or partial.op != "call_function" or partial.target is not aten.add.Tensor:
        return None
    addition = as_addition(operation_name(partial.target), partial.args, partial.kwargs)
    if addition is None or not addition.commutes:
        return None
    terms = (addition.skip, addition.branch)
    values = [term.meta["val"] for term in (partial, *terms) if isinstance(term, fx.Node)]
    if len(values) != 3 or any(v.shape != values[0].shape or v.dtype != values[0].dtype for v in values):
        return None
    if any(user is not merge and user < last for user in partial.users):
        return None
    return _Terms(*terms)


def _writes_between(first: fx.Node, last: fx.Node) -> bool:
    """Whether something between two nodes may change a tensor that the fused operator would read later."""
    node = first.next
    while node is not last:
        if node.op in ("call_function", "call_method"):
            name = operation_name(node.target)
            if name.endswith("_") or name == "setitem":
                return True
        node = node.next
    return False
