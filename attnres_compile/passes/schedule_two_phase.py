"""Turn the plain reads of one block into both phases: one ``inter_block``, and a ``merge`` for each.

Before::

    %h1 = depth_attention([%b0, %b1], %q1, %k1, eps, 2.0)
    %h2 = depth_attention([%b0, %b1, %p1], %q2, %k2, eps, 3.0)
    %h3 = depth_attention([%b0, %b1, %p2], %q3, %k3, eps, 3.0)

After::

    %queries, %key_norms = slice(%query, 0, 1, 4), slice(%key_norm, 0, 1, 4)
    %o, %m, %l = inter_block([%b0, %b1], %queries, %key_norms, eps)
    %h1 = merge(%o[0], %m[0], %l[0], None, None, None, eps, 2.0)
    %h2 = merge(%o[1], %m[1], %l[1], %p1, %q2, %k2, eps, 3.0)
    %h3 = merge(%o[2], %m[2], %l[2], %p2, %q3, %k3, eps, 3.0)

Assumes that nothing writes to a source, but nothing about blocks: reads in a row share a first phase when their
sources are the same but for the last one. That finds the blocks of Block AttnRes, and pairs of reads in Full AttnRes.
Leaves a read that shares with no other as it is. The first phase is placed in front of the first read, so that its
results live shortest.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attnres_compile.passes._emit import emit, replace
from attnres_compile.passes.base import Subject

aten = torch.ops.aten
ops = torch.ops.attnres_compile

NAME = "schedule_two_phase"
Sources = tuple[fx.Node, ...]


@dataclass(frozen=True)
class ScheduleTwoPhase:
    """Pass: see the module's text."""

    def __call__(self, subject: Subject) -> bool:
        """Schedule every group of reads that shares at least two sources."""
        groups = list(_groups(subject.module.graph))
        for shared, reads in groups:
            _schedule(shared, reads)
        if groups:
            subject.edited = True
        return bool(groups)


def _groups(graph: fx.Graph) -> Iterator[tuple[Sources, list[fx.Node]]]:
    """The shared sources of each group of reads, and the reads in order."""
    reads: list[fx.Node] = []
    shared: set[Sources] = set()
    for read in graph.find_nodes(op="call_function", target=ops.depth_attention.default):
        common = shared & _prefixes(read)
        if reads and common and _alike(reads[0], read):
            shared, reads = common, [*reads, read]
            continue
        yield from _group(shared, reads)
        shared, reads = _prefixes(read), [read]
    yield from _group(shared, reads)


def _group(shared: set[Sources], reads: list[fx.Node]) -> Iterator[tuple[Sources, list[fx.Node]]]:
    if len(reads) > 1:
        yield max(shared, key=len), reads


def _prefixes(read: fx.Node) -> set[Sources]:
    sources: Any = tuple(read.args[0])  # type: ignore[arg-type]
    # One shared source is read as cheaply with the last one, and must not keep a read from the next group.
    return {prefix for prefix in (sources, sources[:-1]) if len(prefix) > 1}


def _alike(first: fx.Node, read: fx.Node) -> bool:
    if first.args[3] != read.args[3] or (first.args[2] is None) != (read.args[2] is None):
        return False
    vectors = [vector for vector in read.args[1:3] if isinstance(vector, fx.Node)]
    return all(vector < first or _movable(vector) for vector in vectors)


def _schedule(shared: Sources, reads: list[fx.Node]) -> None:
    first = reads[0]
    eps = first.args[3]
    queries = _gathered([read.args[1] for read in reads], first)
    key_norms = None if first.args[2] is None else _gathered([read.args[2] for read in reads], first)
    phase = emit(NAME, first, ops.inter_block.default, list(shared), queries, key_norms, eps)
    rows = [emit(NAME, first, aten.unbind.int, emit(NAME, first, operator.getitem, phase, i)) for i in range(3)]
    for row, read in enumerate(reads):
        sources, query, key_norm, _, scale = read.args
        o, m, l = (emit(NAME, read, operator.getitem, each, row) for each in rows)
        partial = None if len(sources) == len(shared) else sources[-1]  # type: ignore[arg-type,index]
        own = (None, None) if partial is None else (query, key_norm)
        merged = emit(NAME, read, ops.merge.default, o, m, l, partial, *own, eps, scale)
        if merged.meta["val"].dtype != read.meta["val"].dtype:
            merged = emit(NAME, read, aten.to.dtype, merged, read.meta["val"].dtype)
        replace(read, merged)


def _gathered(vectors: Sequence[Any], before: fx.Node) -> fx.Node:
    """The vectors as rows of one matrix: a slice where they are rows of one already, which costs nothing."""
    for vector in vectors:
        _hoist(vector, before)
    matrix, start = _row(vectors[0])
    if [_row(vector) for vector in vectors] == [(matrix, start + i) for i in range(len(vectors))] and start >= 0:
        return emit(NAME, before, aten.slice.Tensor, matrix, 0, start, start + len(vectors))
    return emit(NAME, before, aten.stack.default, list(vectors))


def _row(vector: fx.Node) -> tuple[Any, int]:
    """The matrix that a vector is a row of, and which; -1 if it is none."""
    if vector.target is not aten.select.int or vector.args[1] != 0 or not isinstance(vector.args[2], int):
        return None, -1
    return vector.args[0], vector.args[2]


def _movable(vector: fx.Node) -> bool:
    """Whether a vector is a parameter or a row of one, which can be had anywhere in the graph."""
    if vector.target is aten.select.int:
        return all(map(_movable, vector.all_input_nodes))
    return vector.op in ("placeholder", "get_attr")


def _hoist(vector: fx.Node, before: fx.Node) -> None:
    for source in vector.all_input_nodes:
        _hoist(source, before)
    if vector.op != "placeholder" and before < vector:
        before.prepend(vector)
