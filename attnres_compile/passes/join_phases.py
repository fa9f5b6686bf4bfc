"""Turn both phases back into plain reads: one ``depth_attention`` for each ``merge``.

Before::

    %o, %m, %l = inter_block([%b0, %b1], slice(%query, 0, 1, 3), slice(%key_norm, 0, 1, 3), eps)
    %h1 = to(merge(%o[0], %m[0], %l[0], None, None, None, eps, 2.0), float16)
    %h2 = merge(%o[1], %m[1], %l[1], %p1, select(%query, 0, 2), select(%key_norm, 0, 2), eps, 3.0)

After::

    %h1 = depth_attention([%b0, %b1], select(%queries, 0, 0), select(%key_norms, 0, 0), eps, 2.0)
    %h2 = depth_attention([%b0, %b1, %p1], select(%query, 0, 2), select(%key_norm, 0, 2), eps, 3.0)

For compilers that fuse across reads themselves: TensorRT computes a source's statistics for all later reads where the
source is made, which the phases hide from it. Assumes nothing about blocks. Leaves a merge whose first phase is not in
the graph or used other vectors, and one without a partial sum that is wanted in fp32.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from attnres_compile.passes._emit import emit, replace
from attnres_compile.passes.base import Subject

aten = torch.ops.aten
ops = torch.ops.attnres_compile

NAME = "join_phases"


class _Phase(NamedTuple):
    """The first phase of a merge, and which of its reads the merge belongs to."""

    node: fx.Node
    read: int


@dataclass(frozen=True)
class JoinPhases:
    """Pass: see the module's text. The first phases are left without users, for ``RemoveDead``."""

    def __call__(self, subject: Subject) -> bool:
        """Join every merge whose first phase is in the graph."""
        merges = subject.module.graph.find_nodes(op="call_function", target=ops.merge.default)
        modified = sum(_join(merge) for merge in merges) > 0
        if modified:
            subject.edited = True
        return modified


def _join(merge: fx.Node) -> bool:
    """Replace a merge; False where that cannot be done."""
    o, m, l, partial, query, key_norm, eps, scale, _ = _arguments(merge)
    phases = {_phase(value, output) for output, value in enumerate((o, m, l))}
    phase = phases.pop()
    if phases or phase is None or phase.node.args[3] != eps:
        return False
    blocks, queries, key_norms = (phase.node.args[i] for i in range(3))
    sources: list[Any] = [*blocks, *([] if partial is None else [partial])]  # type: ignore[misc]
    casts = [] if _dtype(merge) == _dtype(sources[0]) else _casts(merge, _dtype(sources[0]))
    if casts is None:
        return False
    if partial is None:
        query = emit(NAME, merge, aten.select.int, queries, 0, phase.read)
        key_norm = key_norms and emit(NAME, merge, aten.select.int, key_norms, 0, phase.read)
    elif not (_is_row(query, queries, phase.read) and _is_row(key_norm, key_norms, phase.read)):
        return False
    read = emit(NAME, merge, ops.depth_attention.default, sources, query, key_norm, eps, scale)
    for old in casts or [merge]:
        replace(old, read)
    if casts:
        for check in list(merge.users):
            merge.graph.erase_node(check)
        merge.graph.erase_node(merge)
    return True


def _arguments(merge: fx.Node) -> list[Any]:
    names = [argument.name for argument in ops.merge.default._schema.arguments]
    return [merge.kwargs.get(name, merge.args[i] if i < len(merge.args) else None) for i, name in enumerate(names)]


def _phase(value: Any, output: int) -> _Phase | None:
    """The first phase that a statistic comes from: ``unbind(inter_block(...)[output])[read]``, or with ``select``."""
    if not isinstance(value, fx.Node):
        return None
    if value.target is operator.getitem and _target(value.args[0]) is aten.unbind.int:
        stacked, read = value.args[0].args[0], value.args[1]  # type: ignore[union-attr]
    elif value.target is aten.select.int and value.args[1] == 0:
        stacked, read = value.args[0], value.args[2]
    else:
        return None
    if _target(stacked) is not operator.getitem or stacked.args[1] != output:  # type: ignore[union-attr]
        return None
    phase: Any = stacked.args[0]  # type: ignore[union-attr]
    if _target(phase) is not ops.inter_block.default or not isinstance(read, int):
        return None
    return _Phase(phase, read)


def _target(node: Any) -> Any:
    return node.target if isinstance(node, fx.Node) else None


def _is_row(vector: Any, matrix: Any, read: int) -> bool:
    """Whether a vector is row ``read`` of a matrix, both of them rows of the same parameter."""
    if vector is None or matrix is None:
        return vector is matrix
    if _target(vector) is not aten.select.int or vector.args[1] != 0:
        return False
    base, start = matrix, 0
    if _target(matrix) is aten.slice.Tensor and matrix.args[1:2] in ((), (0,)):
        base, start = matrix.args[0], matrix.args[2] if len(matrix.args) > 2 else 0
    elif _target(matrix) is aten.stack.default:
        return bool(matrix.args[0][read] is vector)
    return bool(vector.args[0] is base and vector.args[2] == start + read)


def _dtype(node: fx.Node) -> torch.dtype:
    found: torch.dtype = node.meta["val"].dtype
    return found


def _casts(merge: fx.Node, dtype: torch.dtype) -> list[fx.Node] | None:
    """The users of a merge's fp32 result if all of them cast it to the sources' dtype, which a plain read has."""
    users = [user for user in merge.users if user.target is not aten._assert_tensor_metadata.default]
    only = all(user.target in (aten.to.dtype, aten._to_copy.default) and _dtype(user) == dtype for user in users)
    return users if users and only else None
