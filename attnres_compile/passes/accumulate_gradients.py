"""Add the gradients of a block as they come, in a backward graph.

Before::

    %g8, ... = inter_block_backward(...)      # of the last block's reads
    ...
    %g7, ... = inter_block_backward(...)
    %s  = add(%g8, %g7)
    ...
    %s2 = add(%s, %g6)

After::

    ...
    %s  = accumulate(%g8, %g7)
    ...
    %s2 = accumulate(%s, %g6)

Inductor makes one kernel of all the additions and runs it when the last gradient is there: every one of them lives
until then, and the embedding has one from each block. Assumes a functional graph of ATen operators. Leaves sums with
any other term.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from attnres_compile.passes._emit import emit, replace
from attnres_compile.passes.base import Subject

aten = torch.ops.aten
ops = torch.ops.attnres_compile

NAME = "accumulate_gradients"
BACKWARDS = (ops.inter_block_backward.default, ops.depth_attention_backward.default)


@dataclass(frozen=True)
class AccumulateGradients:
    """Pass: see the module's text."""

    def __call__(self, subject: Subject) -> bool:
        """Replace every addition of two gradients that reads have for their sources."""
        gradients: set[fx.Node] = set()
        modified = False
        for node in list(subject.module.graph.nodes):
            if _is_gradient(node):
                gradients.add(node)
            elif node.target is aten.add.Tensor and not node.kwargs and _both(node, gradients):
                total = emit(NAME, node, ops.accumulate.default, *node.args)
                replace(node, total)
                gradients.add(total)
                modified = True
        subject.edited |= modified
        return modified


def _is_gradient(node: fx.Node) -> bool:
    """Whether a node is an item of the list that is a backward's first result."""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
        if node.target in BACKWARDS:
            return True
    return False


def _both(node: fx.Node, gradients: set[fx.Node]) -> bool:
    if not gradients.issuperset(node.all_input_nodes) or len(node.args) != 2:
        return False
    values = [argument.meta["val"] for argument in node.args if isinstance(argument, fx.Node)]
    return len(values) == 2 and all(v.shape == node.meta["val"].shape and v.dtype == values[0].dtype for v in values)
