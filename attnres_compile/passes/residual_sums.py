"""Find the residual adds of a graph: sums in which one term is computed from another through a weight.

This is the half of detection that looks for evidence; ``detect_chains`` follows the streams that start there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from attnres_compile.arithmetic import (
    CASTS,
    DROPOUTS,
    INDEXING,
    PERMUTATIONS,
    ROW_MAJOR,
    SCALINGS,
    UNCHANGED,
    Addition,
    as_addition,
    carried_axis,
    operation_name,
    scaling_factor,
)
from attnres_compile.passes import _nodes

CARRYING = UNCHANGED | CASTS | ROW_MAJOR | INDEXING | PERMUTATIONS | DROPOUTS | SCALINGS


@dataclass(frozen=True)
class ResidualSum:
    """An add whose ``skip`` operand is an ancestor, through a weight, of its other operand.

    Attributes:
        node: the add.
        root: what the operand that continues the stream is a carried form of.
        path: the nodes from that operand back to ``root``, both included.
    """

    node: fx.Node
    root: fx.Node
    path: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Sums:
    """The residual adds of a graph, in graph order, and how many follow each other from a node on.

    Attributes:
        residual: the adds.
        depth: per node how many follow.
        gated: sums whose skip is multiplied by a tensor, such as one weight a feature: no residual adds.
        gated_in_a_row: those whose skip is another one, or that are the skip of another one: a stream with gates.
    """

    residual: tuple[ResidualSum, ...]
    depth: dict[fx.Node, int]
    gated: tuple[fx.Node, ...] = ()
    gated_in_a_row: tuple[fx.Node, ...] = ()


def find(module: fx.GraphModule) -> Sums:
    """All residual adds in one sweep: ancestors are bit sets over the possible skips."""
    additions = {node: found for node in module.graph.nodes if (found := _addition(node, module)) is not None}
    paths = {operand: carried_path(operand, module) for found in additions.values() for operand in _terms(found)}
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    factors = {root: _factors(root, module) for root in {path[-1] for path in paths.values()}}
    marked = {*factors, *(factor for found in factors.values() for factor in found)}
    roots = sorted(marked, key=order.__getitem__)
    own = {root: 1 << i for i, root in enumerate(roots)}
    lineage = dict(own)
    ancestors = _ancestors(module, own)
    residual: dict[fx.Node, ResidualSum] = {}
    for node, addition in additions.items():
        root_of = {term: paths[term][-1] for term in _terms(addition)}
        evidence = _evidence(addition, ancestors)
        # The skip is an ancestor of another term. Failing that, an earlier state of it is: a branch that left the
        # stream earlier (parallel attention and MLP).
        skips = [term for term, found in evidence if found & own[root_of[term]]]
        skips = skips or [term for term, found in evidence if found & lineage[root_of[term]]]
        # A later state of the same stream among the terms is the stream; the skip is re-injected.
        for skip in list(skips):
            bits = lineage[root_of[skip]]
            skips += [t for t, root in root_of.items() if t is not skip and root in residual and lineage[root] & bits]
        skips = [skip for skip in skips if _nodes.shape(skip) == _nodes.shape(node)]
        if skips:
            path = paths[max(skips, key=lambda skip: order[paths[skip][-1]])]
            residual[node] = ResidualSum(node, path[-1], path)
        continued = [residual[node].root] if node in residual else root_of.values()
        for root in continued:
            lineage[node] = lineage.get(node, 0) | lineage[root]
    depth: dict[fx.Node, int] = {}
    for node, addition in reversed(additions.items()):
        terms = [residual[node].root] if node in residual else [paths[term][-1] for term in _terms(addition)]
        for root in terms:
            depth[root] = max(depth.get(root, 0), depth.get(node, 0) + (node in residual))
    gated: dict[fx.Node, set[fx.Node]] = {}
    for node, addition in additions.items():
        evidence = [] if node in residual else _evidence(addition, ancestors)
        gates = {factor for term, found in evidence for factor in factors[paths[term][-1]] if found & own[factor]}
        if gates:
            gated[node] = gates
    follows = {node: gates & gated.keys() for node, gates in gated.items()}
    in_a_row = tuple(node for node in gated if follows[node] or any(node in before for before in follows.values()))
    return Sums(tuple(residual.values()), depth, tuple(gated), in_a_row)


def _factors(node: fx.Node, module: fx.GraphModule) -> list[fx.Node]:
    """Of a product of tensors the factors that have its shape, and what they are forms of."""
    if _nodes.name_of(node, module) not in ("mul", "mul_"):
        return []
    factors = [factor for factor in node.all_input_nodes if _nodes.shape(factor) == _nodes.shape(node)]
    return [carried_path(factor, module)[-1] for factor in factors]


def _addition(node: fx.Node, module: fx.GraphModule) -> Addition | None:
    if node.op not in ("call_function", "call_method") or not _nodes.is_float(node):
        return None
    addition = as_addition(_nodes.name_of(node, module), node.args, node.kwargs)
    if addition is None or len(_nodes.shape(node) or ()) < 2:
        return None
    operands = (addition.skip, *addition.branch) if addition.product is not None else (addition.skip, addition.branch)
    return addition if all(isinstance(operand, fx.Node) for operand in operands) else None


def _terms(addition: Addition) -> tuple[fx.Node, ...]:
    return (addition.skip,) if addition.product is not None else (addition.skip, addition.branch)


def _evidence(addition: Addition, ancestors: _Ancestors) -> list[tuple[fx.Node, int]]:
    """Per operand that may continue a stream, what the rest of the sum depends on through a weight."""
    skip, branch = addition.skip, addition.branch
    if addition.product is None:
        return [(skip, ancestors.weighted[branch]), (branch, ancestors.weighted[skip])]
    mixes = operation_name(addition.product) in _nodes.WEIGHT_OPS
    known = ancestors.all if mixes else ancestors.weighted
    return [(skip, known[branch[0]] | known[branch[1]])]


class _Ancestors(NamedTuple):
    """Per node the marked nodes that it depends on, and those that it depends on through a weight, as bit sets."""

    all: dict[fx.Node, int]
    weighted: dict[fx.Node, int]


def _ancestors(module: fx.GraphModule, bits: dict[fx.Node, int]) -> _Ancestors:
    found = _Ancestors({}, {})
    for node in module.graph.nodes:
        reach = weighted = 0
        for source in node.all_input_nodes:
            reach |= found.all[source]
            weighted |= found.weighted[source]
        if reach and _nodes.has_weight(node, module):
            weighted |= reach
        found.all[node], found.weighted[node] = reach | bits.get(node, 0), weighted
    return found


def carried_path(node: fx.Node, module: fx.GraphModule) -> tuple[fx.Node, ...]:
    """From a node back through operations that a stream carries, to what it is a form of."""
    path = [node]
    while (previous := carried_input(path[-1], module)) is not None:
        path.append(previous)
    return tuple(path)


def carried_input(node: fx.Node, module: fx.GraphModule) -> fx.Node | None:
    """The tensor that a carried operation passes on, or None."""
    name = _nodes.name_of(node, module)
    if node.op not in ("call_function", "call_method", "call_module") or not node.args:
        return None
    if name in ("add", "radd") and any(isinstance(arg, int | float) and arg == 0 for arg in node.args):
        return node.all_input_nodes[0]  # the 0 that Python's sum starts with
    if name not in CARRYING:
        return None
    args = list(node.args)
    if name == "mul" and (not isinstance(args[0], fx.Node) or set(_nodes.shape(args[0]) or ()) <= {1}):
        args.reverse()
    source = args[0]
    before, after = _nodes.shape(source), _nodes.shape(node)
    if not isinstance(source, fx.Node) or before is None or after is None or not _nodes.is_float(source):
        return None
    if name in SCALINGS and scaling_factor(name, [source, *map(_nodes.value, args[1:])], len(before)) is None:
        return None
    # Which axis holds the features is not known yet: the last one, or the one behind the batch.
    axes = (carried_axis(name, args, before, after, axis) for axis in {-1, min(1 - len(before), -1)})
    return source if name in PERMUTATIONS or any(axis is not None for axis in axes) else None
