"""How a pipeline runs."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from attnres_compile.passes._emit import STAMP
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


@dataclass(frozen=True)
class AddNode:
    """Adds a node that is marked as a pass's, with what is given as its value."""

    meta: dict[str, Any]

    def __call__(self, subject: Subject) -> bool:
        graph = subject.module.graph
        x = next(iter(graph.nodes))
        with graph.inserting_after(x):
            node = graph.call_function(torch.ops.aten.sin.default, (x,))
        node.meta |= self.meta
        return True


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


@pytest.mark.parametrize(
    "value", [{}, {"val": torch.ones(2)}, {"val": (None, torch.ones(2))}], ids=["none", "real", "one of several"]
)
def test_added_nodes_need_fake_values(value: dict[str, Any]) -> None:
    step = AddNode({STAMP: "a pass"} | value)
    with pytest.raises(AssertionError, match="after AddNode: sin_default, which a pass added, has no fake value"):
        run((step, Recorded("never")), subject(traced(Net())))
    # of other nodes no value is asked
    run((AddNode(value),), subject(traced(Net())))
    with FakeTensorMode():
        fake = torch.ones(2)
    run((AddNode({STAMP: "a pass", "val": (fake, 3)}),), subject(traced(Net())))


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
