"""How a pipeline runs."""

from dataclasses import dataclass, field

import pytest
from torch import fx

from attnres_compile.passes.base import Subject, run
from tests.passes.models import Net
from tests.passes.tracing import subject, traced


@dataclass(frozen=True)
class Recorded:
    """A pass that writes down its name and the state of the graph's check."""

    name: str
    seen: list[str] = field(default_factory=list)
    modified: bool = True

    def __call__(self, subject: Subject) -> bool:
        self.seen.append(self.name)
        return self.modified


@dataclass(frozen=True)
class BreakGraph:
    """Puts a node before its operand, and says so or not."""

    modified: bool

    def __call__(self, subject: Subject) -> bool:
        nodes = [node for node in subject.module.graph.nodes if node.op == "call_function"]
        nodes[0].prepend(nodes[-1])
        return self.modified


def test_order_and_result() -> None:
    seen: list[str] = []
    found = subject(traced(Net()))
    assert run((Recorded("a", seen), Recorded("b", seen, modified=False), Recorded("c", seen)), found) is found
    assert seen == ["a", "b", "c"]
    assert run((), found) is found


def test_graph_is_checked_after_a_pass_that_changed_it() -> None:
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        run((BreakGraph(modified=True), Recorded("never")), subject(traced(Net())))
    # an untrue False is the pass's own fault: nothing is checked
    run((BreakGraph(modified=False),), subject(traced(Net())))


def test_check_stops_the_pipeline() -> None:
    seen: list[str] = []
    with pytest.raises(RuntimeError):
        run((Recorded("a", seen), BreakGraph(modified=True), Recorded("b", seen)), subject(traced(Net())))
    assert seen == ["a"]


def test_subject_starts_empty() -> None:
    module = fx.symbolic_trace(Net())
    first, second = subject(module), subject(module)
    first.chains.append(None)  # type: ignore[arg-type]
    assert (second.chains, second.refusals) == ([], [])
