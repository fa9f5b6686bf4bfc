"""What a pass is, and how a pipeline of passes runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from attnres_compile.chains import Refusal, ResidualChain
from attnres_compile.config import AttnResConfig
from attnres_compile.passes._emit import STAMP


@dataclass
class Subject:
    """A graph and what is known about it; each pass adds to it.

    Attributes:
        module: the graph, with ``meta["val"]`` on its nodes.
        config: the options.
        chains: residual chains in execution order.
        refusals: candidates that are no chain, with the reason.
        edited: whether the graph is ahead of the module's code; a pass that edits the graph says so.
    """

    module: fx.GraphModule
    config: AttnResConfig
    chains: list[ResidualChain] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    edited: bool = False


class Pass(Protocol):
    """One step over a subject. Options are the fields of a frozen dataclass."""

    def __call__(self, subject: Subject) -> bool:
        """Do the step; True when it changed the graph or what is known about it."""


def run(pipeline: Sequence[Pass], subject: Subject) -> Subject:
    """Run the passes in order, and check the graph after each."""
    for step in pipeline:
        if step(subject):
            subject.module.graph.lint()
            _check_values(subject.module.graph, step)
    if subject.edited:
        # Once: generating the code of a deep model takes longer than a pass does.
        subject.module.recompile()
        subject.edited = False
    return subject


def _check_values(graph: fx.Graph, step: Pass) -> None:
    """Every later pass, and the compiler behind, go by the values of the nodes that a pass added."""
    for node in graph.nodes:
        tensors = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
        if STAMP in node.meta and ("val" not in node.meta or not all(isinstance(v, FakeTensor) for v in tensors)):
            where = f"{node.name}, which {node.meta[STAMP]} added"
            raise AssertionError(f"after {type(step).__name__}: {where}, has no fake value")
