"""Remove nodes that nothing depends on.

Before::

    %unbind = unbind(%l)
    %l1     = getitem(%unbind, 1)          # nobody reads this state
    output(%h)

After::

    output(%h)

Assumes no order of the passes before it. Leaves inputs, and whatever may do more than return its result: an operator
that writes, checks or draws random numbers, a method (``x.add_(f)``), a module, a Python function.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from attnres_compile.passes.base import Subject


@dataclass(frozen=True)
class RemoveDead:
    """Pass: see the module's text."""

    def __call__(self, subject: Subject) -> bool:
        """Remove them, last first."""
        modified = False
        for node in reversed(subject.module.graph.nodes):
            if not node.users and _only_returns(node):
                subject.module.graph.erase_node(node)
                modified = True
        if modified:
            subject.edited = True
        return modified


def _only_returns(node: fx.Node) -> bool:
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    # fx's own rule takes every method, every Python function and some checks for pure.
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.returns) and not node.is_impure()
