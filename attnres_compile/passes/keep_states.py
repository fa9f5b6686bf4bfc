"""Between two checkpointed layers, keep what their state is a view of, in a joint graph.

Before (``[1]``, ``[2]``: the checkpointed layers, numbered)::

    %out = addmm(...)             [1]
    %p   = view(%out, ...)        [1]         # the partial sum after the first branch of a block
    %p2  = add(%p, ...)           [2]

After::

    %out = addmm(...)             [1]
    %p   = view(%out, ...)        [2]
    %p2  = add(%p, ...)           [2]

PyTorch's partitioner keeps the tensors that one checkpointed layer hands to the next, and computes views anew: from a
tensor within the first layer, which it then computes anew as well, while the second one's are still there. A state of
the standard residual stream is the result of an addition. Assumes the tags of ``torch.utils.checkpoint`` on the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch._functorch.partitioners import must_recompute

from attnres_compile.passes.base import Subject

LAYER = "ac_graph_id"


@dataclass(frozen=True)
class KeepStates:
    """Pass: see the module's text."""

    def __call__(self, subject: Subject) -> bool:
        """Hand every view that only later layers use to the first of them."""
        modified = False
        # A view of a view follows it.
        for node in reversed(subject.module.graph.nodes):
            if not isinstance(node.target, torch._ops.OpOverload) or not node.target.is_view or not _tagged(node):
                continue
            users = [user.meta[LAYER] for user in node.users if _tagged(user)]
            if users and min(users) > node.meta[LAYER]:
                node.meta[LAYER] = min(users)
                modified = True
        return modified


def _tagged(node: fx.Node) -> bool:
    return LAYER in node.meta and must_recompute(node)
