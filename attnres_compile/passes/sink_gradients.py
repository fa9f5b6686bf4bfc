"""Sum the gradients of a parameter's rows at the end of a backward graph, when all of them are there.

Before::

    %g24 = select_scatter(%zeros, %q24, 0, 24)      # the last read's pseudo-query comes first
    ...                                             # the backward of every layer
    %g0  = select_scatter(%zeros, %q0, 0, 0)
    %sum = add(%g24, %g0)

After::

    ...
    %g24 = select_scatter(%zeros, %q24, 0, 24)
    %g0  = select_scatter(%zeros, %q0, 0, 0)
    %sum = add(%g24, %g0)

Inductor makes one kernel of such a sum and puts it where its first term was; all that its last term depends on comes
before it then, the gradients of the layers' weights come after, and what they are computed from is kept until the end.
Assumes a functional graph of ATen operators whose outputs are what is returned. Leaves sums with any other term.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from attnres_compile.passes.base import Subject

aten = torch.ops.aten

ROWS = (aten.select_scatter.default, aten.slice_scatter.default)


@dataclass(frozen=True)
class SinkGradients:
    """Pass: see the module's text."""

    def __call__(self, subject: Subject) -> bool:
        """Move every sum of rows that is only returned, and its terms, in front of the output."""
        graph = subject.module.graph
        sums = _sums(graph)
        first = graph.output_node()
        sunk, modified = {first}, False
        for node in reversed(list(graph.nodes)):
            if node not in sums or not node.users or not sunk.issuperset(node.users):
                continue
            if node.next is not first:
                first.prepend(node)
                modified = True
            sunk.add(node)
            first = node
        if modified:
            subject.edited = True
        return modified


def _sums(graph: fx.Graph) -> set[fx.Node]:
    """Rows in a matrix of zeros, and what is a sum of such."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target in ROWS or (node.target is aten.add.Tensor and found.issuperset(node.args)):
            found.add(node)
    return found
