"""Plain data that the analysis hands on: chains, block plans, refusals."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch.fx import Node


@dataclass(frozen=True)
class Refusal:
    """Why something that looks like a residual chain is none, or cannot be rewritten."""

    reason: str
    node: str
    where: str


@dataclass(frozen=True)
class BlockPlan:
    """How one chain is cut into blocks. Positions count pushes: 0 is the source, ``i`` the state after push ``i``.

    Attributes:
        chain: index of the chain among the rewritten ones, which is that of its parameters.
        rows: per position the row of its read in ``query [L, d]``, or -1 where nothing reads.
        closes: per position whether a block ends there.
        phase_rows: per position the first and the past-the-last row of the reads over the blocks finished by then.
        block_sizes: in sublayers.
        sources: per row the number of sources that it reads when every sublayer runs.
        preserve: multiply a read by its number of sources.
        eps: of the keys' RMSNorm.
    """

    chain: int
    rows: tuple[int, ...]
    closes: tuple[bool, ...]
    phase_rows: tuple[tuple[int, int], ...]
    block_sizes: tuple[int, ...]
    sources: tuple[int, ...]
    preserve: bool
    eps: float

    @property
    def last(self) -> int:
        """The position of the final state."""
        return len(self.rows) - 1

    @property
    def reads(self) -> int:
        """Rows of the chain's parameters: reads of more than one source."""
        return len(self.sources)


@dataclass(frozen=True)
class Push:
    """One residual add: the state at ``position`` is the one before it plus a branch."""

    node: Node
    position: int
    owner: str
    owner_class: str
    previous: Push | None


@dataclass(frozen=True)
class Start:
    """Where a chain's source is a value that crosses a module boundary.

    Attributes:
        module: path of the module.
        side: whether the source is an argument or the output.
        shape: of the source.
        call: key of the call of that module that the source crosses into or out of.
    """

    module: str
    side: Literal["argument", "output"]
    shape: tuple[int, ...]
    call: str = field(default="", compare=False)


@dataclass
class ResidualChain:
    """A residual stream: a source, the adds on it, and who reads which of its states.

    Attributes:
        source: the node whose value is ``b_0``.
        axis: the feature axis of the source, counted from the end (-1 unless the stream is channel-first).
        width: size of that axis.
        start: the module boundary that the source crosses, None where there is none.
        pushes: in execution order.
        readers: per position the nodes that read that state.
        boundaries: per reading node the module call whose entry (or the container's exit) makes the read.
        entries: per key of a module call the position of the latest state that enters it.
        anchors: per module path the positions at which the stream enters it, one per visit.
        container: path of the module that holds the whole chain.
    """

    source: Node
    axis: int
    width: int
    start: Start | None
    pushes: list[Push] = field(default_factory=list)
    readers: dict[int, list[Node]] = field(default_factory=dict)
    boundaries: dict[Node, str] = field(default_factory=dict)
    entries: dict[str, int] = field(default_factory=dict)
    anchors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    container: str = ""
    plan: BlockPlan | None = None

    def main_path(self, evidence: Container[Node]) -> set[Node]:
        """The pushes that lead to one for which there is evidence; the others are terms of a branch's input."""
        found: set[Node] = set()
        for push in reversed(self.pushes):
            if push.node in evidence or push.node in found:
                found.add(push.node)
                if push.previous is not None:
                    found.add(push.previous.node)
        return found

    @property
    def length(self) -> int:
        """The position of the final state."""
        return max((push.position for push in self.pushes), default=0)

    @property
    def sublayers(self) -> int:
        """States after the source that somebody reads."""
        return sum(1 for position in self.readers if position > 0)
