"""What a pass is, and how a pipeline of passes runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import fx

from attnres_compile.chains import Refusal, ResidualChain
from attnres_compile.config import AttnResConfig


@dataclass
class Subject:
    """A graph and what is known about it; each pass adds to it.

    Attributes:
        module: the graph, with ``meta["val"]`` on its nodes.
        config: the options.
        chains: residual chains in execution order.
        refusals: candidates that are no chain, with the reason.
    """

    module: fx.GraphModule
    config: AttnResConfig
    chains: list[ResidualChain] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)


class Pass(Protocol):
    """One step over a subject. Options are the fields of a frozen dataclass."""

    def __call__(self, subject: Subject) -> bool:
        """Do the step; True when it changed the graph or what is known about it."""


def run(pipeline: Sequence[Pass], subject: Subject) -> Subject:
    """Run the passes in order, and check the graph after each."""
    for step in pipeline:
        if step(subject):
            subject.module.graph.lint()
    return subject
