"""Keep what one checkpointed region hands to the next, where that is a view.

Before::

    %out  = mm(%x, %w)              # recomputed, region 1
    %view = view(%out, [1, 512, 512])    # recomputed, region 1
    %h    = merge(%o, %m, %l, %view, ...)     # recomputed, region 2

After::

    %out  = mm(%x, %w)              # kept

PyTorch's partitioner keeps the last value of a region, but recomputes a view although it is to be kept, and with it the
end of the layer before. A residual stream is a sum, and no view; a partial sum of one branch is. Assumes a joint graph
with the regions in its nodes' meta. Leaves values that are handed on as they are, and those of this library's
operators, which are cheap to compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from attnres_compile.passes.base import Subject

RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclass(frozen=True)
class KeepBoundaries:
    """Pass: see the module's text."""

    def __call__(self, subject: Subject) -> bool:
        """Mark what such views are views of."""
        modified = False
        for node in subject.module.graph.nodes:
            base = _base(node)
            if base is not node and _recomputed(base) and any(_later(user, node) for user in node.users):
                base.meta["recompute"] = CheckpointPolicy.MUST_SAVE
                modified = True
        return modified


def _base(node: fx.Node) -> fx.Node:
    """The operation whose result a view shows; the node itself where that is none of ATen's with one result."""
    base = node
    while isinstance(base.target, torch._ops.OpOverload) and base.target.is_view:
        base = base.all_input_nodes[0]
    is_aten = isinstance(base.target, torch._ops.OpOverload) and base.target.namespace == "aten"
    return base if is_aten else node


def _recomputed(node: fx.Node) -> bool:
    return node.meta.get("recompute") in RECOMPUTED


def _later(user: fx.Node, node: fx.Node) -> bool:
    return _recomputed(user) and user.meta.get("ac_graph_id", 0) > node.meta.get("ac_graph_id", 0)
