"""Sublayers by the names of the user's modules, for reports and pictures."""

from __future__ import annotations

from torch import fx

from attnres_compile.chains import Push, ResidualChain
from attnres_compile.passes import _nodes

DEEPEST = 4  # modules below an add's owner that a name may have


def sublayer_names(chain: ResidualChain) -> tuple[str, ...]:
    """Per sublayer the paths of the modules that make what it adds, joined by " + " where branches run side by side.

    A branch is named after the child of the add's owner that holds its last weight, or further down where that would
    give two sublayers one name.
    """
    ends = {chain.source, *(push.node for push in chain.pushes)}
    sublayers: list[list[Push]] = [[]]
    for push in sorted(chain.pushes, key=lambda push: push.position):
        sublayers[-1].append(push)
        if push.position in chain.readers:
            sublayers.append([])
    paths = [[_branches(push, ends) for push in pushes] for pushes in sublayers[: chain.sublayers]]
    cut = [[_joined(names, depth) for names in paths] for depth in range(1, DEEPEST + 1)]
    return tuple(max(cut, key=lambda names: len(set(names))))


def _branches(push: Push, ends: set[fx.Node]) -> list[tuple[str, str]]:
    """Where the last weights before an add are: the add's owner, and the path from there; in order of execution."""
    owner, graph = push.owner, push.node.graph.owning_module
    found: dict[fx.Node, tuple[str, str]] = {}
    pending, seen = [push.node], set(ends) - {push.node}
    while pending:
        node = pending.pop()
        stack = _nodes.calls(node)
        path = stack[-1].path if stack else ""
        if stack and graph is not None and _nodes.has_weight(node, graph):
            inside = not owner or path.startswith(f"{owner}.")
            found[node] = (owner, path.removeprefix(owner).removeprefix(".")) if inside else (path, "")
            continue
        new = [source for source in node.all_input_nodes if source not in seen]
        seen.update(new)
        pending += new
    places = [found[node] for node in sorted(found)]
    return list(dict.fromkeys(places)) or [(owner or push.node.name, "")]


def _joined(branches: list[list[tuple[str, str]]], depth: int) -> str:
    names = [".".join(filter(None, (owner, *below.split(".")[:depth]))) for push in branches for owner, below in push]
    return " + ".join(dict.fromkeys(names))
