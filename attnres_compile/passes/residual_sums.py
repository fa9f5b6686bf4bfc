"""Find the residual adds of a graph: sums in which one term is computed from another through a weight.

This is the half of detection that looks for evidence; ``detect_chains`` follows the streams that start there.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from attnres_compile.arithmetic import (
    CASTS,
    DROPOUTS,
    INDEXING,
    PERMUTATIONS,
    ROW_MAJOR,
    SCALINGS,
    UNCHANGED,
    as_addition,
    carried_axis,
    scaling_factor,
)
from attnres_compile.passes import _nodes

CARRYING = UNCHANGED | CASTS | ROW_MAJOR | INDEXING | PERMUTATIONS | DROPOUTS | SCALINGS


@dataclass(frozen=True)
class ResidualSum:
    """An add whose ``skip`` operand is an ancestor, through a weight, of its other operand.

    Attributes:
        node: the add.
        skip: its operand that continues the stream.
        root: what ``skip`` is a carried form of; ``path`` leads from ``skip`` back to it.
        path: the nodes from ``skip`` to ``root``, both included.
    """

    node: fx.Node
    skip: fx.Node
    root: fx.Node
    path: tuple[fx.Node, ...]


def find(module: fx.GraphModule) -> list[ResidualSum]:
    """All residual adds, in graph order, in one sweep: ancestors are bit sets over the possible skips."""
    candidates = [(node, *_operands(node, module)) for node in module.graph.nodes if _is_sum(node, module)]
    paths = {operand: carried_path(operand, module) for _, *operands in candidates for operand in operands}
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    roots = sorted({path[-1] for path in paths.values()}, key=order.__getitem__)
    lineage = {root: 1 << i for i, root in enumerate(roots)}
    through_weight = _ancestors(module, dict(lineage))
    found = []
    for node, first, second in candidates:
        pairs = [(first, second), (second, first)]
        skips = [skip for skip, other in pairs if through_weight[other] & lineage[paths[skip][-1]]]
        skips = [skip for skip in skips if _nodes.shape(skip) == _nodes.shape(node)]
        if skips:
            # The latest state is the stream; an earlier one is re-injected.
            skip = max(skips, key=lambda s: order[paths[s][-1]])
            found.append(ResidualSum(node, skip, paths[skip][-1], paths[skip]))
            # A branch that left the stream earlier is one of this state as well (parallel attention and MLP).
            lineage[node] = lineage.get(node, 0) | lineage[paths[skip][-1]]
    return found


def _is_sum(node: fx.Node, module: fx.GraphModule) -> bool:
    if node.op not in ("call_function", "call_method") or not _nodes.is_float(node):
        return False
    addition = as_addition(_nodes.name_of(node, module), node.args, node.kwargs)
    found = _nodes.shape(node)
    return addition is not None and found is not None and len(found) > 1 and len(_operands(node, module)) == 2


def _operands(node: fx.Node, module: fx.GraphModule) -> tuple[fx.Node, ...]:
    addition = as_addition(_nodes.name_of(node, module), node.args, node.kwargs)
    if addition is None or not isinstance(addition.skip, fx.Node):
        return ()
    branch = addition.branch[-1] if addition.product is not None else addition.branch
    if addition.product is not None:
        # A fused form multiplies two operands; the branch depends on the skip if either does.
        branch = next((b for b in addition.branch if isinstance(b, fx.Node) and b.op == "call_function"), branch)
    return (addition.skip, branch) if isinstance(branch, fx.Node) else ()


def _ancestors(module: fx.GraphModule, bits: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Per node the marked nodes that it depends on through a weight, as a bit set."""
    reaches: dict[fx.Node, int] = {}
    through: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        reach = weighted = 0
        for source in node.all_input_nodes:
            reach |= reaches[source]
            weighted |= through[source]
        if reach and _nodes.has_weight(node, module):
            weighted |= reach
        reaches[node], through[node] = reach | bits.get(node, 0), weighted
    return through


def carried_path(node: fx.Node, module: fx.GraphModule) -> tuple[fx.Node, ...]:
    """From a node back through operations that a stream carries, to what it is a form of."""
    path = [node]
    while (previous := carried_input(path[-1], module)) is not None:
        path.append(previous)
    return tuple(path)


def carried_input(node: fx.Node, module: fx.GraphModule) -> fx.Node | None:
    """The tensor that a carried operation passes on, or None."""
    name = _nodes.name_of(node, module)
    if node.op not in ("call_function", "call_method", "call_module") or name not in CARRYING or not node.args:
        return None
    args = list(node.args)
    if name == "mul" and isinstance(args[0], fx.Node) and len(_nodes.shape(args[0]) or ()) == 0:
        args.reverse()
    source = args[0]
    before, after = _nodes.shape(source), _nodes.shape(node)
    if not isinstance(source, fx.Node) or before is None or after is None or not _nodes.is_float(source):
        return None
    if name in SCALINGS and scaling_factor(name, [source, *map(_nodes.value, args[1:])]) is None:
        return None
    axis = carried_axis(name, args, before, after, -1)
    return source if axis is not None or name in PERMUTATIONS else None
