"""Follow streams through a graph: what a live stream would do at each node, without computing anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from attnres_compile.arithmetic import (
    CASTS,
    DROPOUTS,
    METADATA,
    SCALINGS,
    UNCHANGED,
    Addition,
    as_addition,
    carried_axis,
    scaling_factor,
)
from attnres_compile.chains import Push, ResidualChain
from attnres_compile.passes import _nodes
from attnres_compile.passes.residual_sums import CARRYING
from attnres_compile.passes.starts import Source, sees

EXIT = "<exit>"


class State(NamedTuple):
    """Which state of which chain a node is."""

    chain: int
    position: int
    axis: int
    push: Push | None = None


@dataclass(frozen=True)
class Boundaries:
    """Module calls that read a stream when it enters them, per chain source; and the call that holds each chain.

    Attributes:
        readers: per source the keys of the reading calls.
        containers: per source the key and the depth of the innermost call that holds all of its pushes.
    """

    readers: Mapping[fx.Node, frozenset[str]]
    containers: Mapping[fx.Node, tuple[_nodes.Call, ...]]

    @staticmethod
    def exits(chains: list[ResidualChain]) -> Boundaries:
        """Only the containers' exits."""
        return Boundaries({}, {chain.source: _container(chain) for chain in chains if chain.pushes})

    @staticmethod
    def around(chains: list[ResidualChain], essential: list[set[fx.Node]], *, outermost: bool) -> Boundaries:
        """The containers' exits, and the modules inside them that read and make no essential push."""
        exits = Boundaries.exits(chains)
        readers = {}
        for chain, pushes in zip(chains, essential, strict=True):
            if not chain.pushes:
                continue
            depth = len(exits.containers[chain.source])
            pushing = {call.key for push in pushes for call in _nodes.calls(push)}
            paths = {call.path for push in pushes for call in _nodes.calls(push)}
            found = set()
            for reader in (node for nodes in chain.readers.values() for node in nodes):
                inside = _nodes.calls(reader)[depth:]
                free = [call.key for call in inside if call.key not in pushing and call.path not in paths]
                found.update(free[:1] if outermost else free[-1:])
            readers[chain.source] = frozenset(found)
        return Boundaries(readers, exits.containers)

    def key(self, source: fx.Node, node: fx.Node) -> str | None:
        """The boundary that a node lies behind for the chain of this source, or None."""
        stack = _nodes.calls(node)
        container = self.containers.get(source, ())
        if container and (len(stack) < len(container) or stack[len(container) - 1].key != container[-1].key):
            return EXIT
        readers = self.readers.get(source, frozenset())
        return next((call.key for call in stack[len(container) :] if call.key in readers), None)


def _container(chain: ResidualChain) -> tuple[_nodes.Call, ...]:
    stacks = [_nodes.calls(push.node) for push in chain.pushes]
    shared = []
    for levels in zip(*stacks, strict=False):
        if len({call.key for call in levels}) > 1:
            break
        shared.append(levels[0])
    return tuple(shared)


def follow(
    module: fx.GraphModule, sources: Mapping[fx.Node, Source], boundaries: Boundaries, *, live: bool = False
) -> list[ResidualChain]:
    """Chains with their pushes, their readers, and the boundary that a reader lies behind.

    Args:
        module: the graph.
        sources: where streams start.
        boundaries: the module calls that read at their entry.
        live: a stream exists only behind the module boundary where it starts; in a graph it does for every user.
    """
    walk = _Walk(module, sources, boundaries, live)
    for node in module.graph.nodes:
        walk.visit(node)
    for chain in walk.chains:
        container = _container(chain) if chain.pushes else ()
        chain.container = container[-1].path if container else ""
    return walk.chains


def changes_nothing(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether a node is a cast to its own dtype, a copy, or a dropout in eval."""
    if node.op not in ("call_function", "call_method", "call_module") or not node.args:
        return False
    name, before, after = _nodes.name_of(node, module), _nodes.value(node.args[0]), _nodes.value(node)
    if name in DROPOUTS:
        rest = [*node.args[1:], *node.kwargs.values()]
        return len(rest) > 1 and (rest[1] is False or rest[0] in (0, 0.0))
    if name not in UNCHANGED and name not in CASTS:
        return False
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return name in UNCHANGED
    return bool(before.dtype == after.dtype and before.device == after.device)


class _Walk:
    def __init__(
        self, module: fx.GraphModule, sources: Mapping[fx.Node, Source], boundaries: Boundaries, live: bool
    ) -> None:
        self.module, self.sources, self.boundaries, self.live = module, sources, boundaries, live
        self.chains: list[ResidualChain] = []
        self.states: dict[fx.Node, State] = {}

    def visit(self, node: fx.Node) -> None:
        """Do what a stream would do at this node."""
        unseen = {s: self.states.pop(s) for s in node.all_input_nodes if self._is_unseen(s, node)}
        inputs = [source for source in node.all_input_nodes if source in self.states]
        for source in inputs:
            self._enter(node, source)
        state = self._same(node)
        if state is None:
            unseen.update(self._behind(node, inputs))
            inputs = [source for source in inputs if source in self.states]
            state = self._added(node) or self._carried(node)
        if state is not None:
            self.states[node] = state
        elif _nodes.name_of(node, self.module) not in METADATA:
            for source in inputs:
                self._read(node, self.states[source])
        if node in self.sources and node not in self.states:
            axis, start = self.sources[node]
            self.states[node] = State(len(self.chains), 0, axis)
            self.chains.append(ResidualChain(node, axis, (_nodes.shape(node) or ())[axis], start))
        self.states.update(unseen)

    def _enter(self, node: fx.Node, source: fx.Node) -> None:
        """Note the state that comes into the module calls around a node from outside of them."""
        state, outer = self.states[source], {call.key for call in _nodes.calls(source)}
        entries = self.chains[state.chain].entries
        for call in _nodes.calls(node):
            if call.key not in outer:
                entries[call.key] = max(state.position, entries.get(call.key, 0))

    def _is_unseen(self, source: fx.Node, node: fx.Node) -> bool:
        """Whether a live stream has not started yet where this node uses its source."""
        if not self.live or source not in self.sources or source not in self.states:
            return False
        start = self.sources[source].start
        return start is not None and self.states[source].position == 0 and not sees(start, node)

    def _read(self, node: fx.Node, state: State, *, leaving: bool = False) -> None:
        chain = self.chains[state.chain]
        if not leaving or state.position == chain.length:
            readers = chain.readers.setdefault(state.position, [])
            if node not in readers:
                readers.append(node)

    def _same(self, node: fx.Node) -> State | None:
        """A cast or a copy that changes nothing: the tracer may hang the stream's later uses on it."""
        source = node.args[0] if node.args else None
        return self._state(source) if changes_nothing(node, self.module) else None

    def _behind(self, node: fx.Node, inputs: list[fx.Node]) -> dict[fx.Node, State]:
        """Reads at boundaries: inside, these streams are plain tensors."""
        hidden = {}
        for source in inputs:
            chain = self.chains[self.states[source].chain]
            key = self.boundaries.key(chain.source, node)
            if key is not None:
                hidden[source] = self.states.pop(source)
                self._read(node, hidden[source], leaving=key == EXIT)
                chain.boundaries[node] = key
        return hidden

    def _added(self, node: fx.Node) -> State | None:
        if node.op not in ("call_function", "call_method"):
            return None
        addition = as_addition(_nodes.name_of(node, self.module), node.args, node.kwargs)
        if addition is None:
            return None
        skip, branch = addition.skip, addition.branch
        ours, theirs = self._state(skip), self._state(branch) if addition.product is None else None
        if theirs and addition.factor == 1 and (ours is None or ours.position < theirs.position):
            skip, branch, ours, theirs = branch, skip, theirs, ours
        if ours is None or (theirs is not None and theirs.chain != ours.chain):
            return None
        if addition.product is None and isinstance(branch, int | float) and branch * addition.factor == 0:
            return ours
        if _nodes.shape(node) != _nodes.shape(skip) or not self._has_features(node, branch, addition, ours.axis):
            return None
        for operand in addition.branch if addition.product is not None else (branch,):
            if (state := self._state(operand)) is not None:
                self._read(node, state)
        state = State(ours.chain, ours.position + 1, ours.axis)
        stack = _nodes.calls(node)
        path, kind = (stack[-1].path, stack[-1].kind) if stack else ("", "")
        push = Push(node, state.position, path, kind, ours.push)
        self.chains[ours.chain].pushes.append(push)
        return state._replace(push=push)

    def _has_features(self, node: fx.Node, branch: object, addition: Addition, axis: int) -> bool:
        """A term that is constant along the features (the mean in a hand-written norm) is no source."""
        if addition.product is not None or not isinstance(branch, fx.Node):
            return True
        shape, width = _nodes.shape(branch), (_nodes.shape(node) or ())[axis]
        return not shape or (len(shape) >= -axis and shape[axis] == width)

    def _carried(self, node: fx.Node) -> State | None:
        name = _nodes.name_of(node, self.module)
        if node.op not in ("call_function", "call_method", "call_module") or name not in CARRYING:
            return None
        args = list(node.args)
        if name == "mul" and self._state(args[0]) is None:
            args.reverse()
        state = self._state(args[0]) if args else None
        if state is None or any(self._state(source) for source in node.all_input_nodes if source is not args[0]):
            return None
        if name in UNCHANGED or name in DROPOUTS:
            return state
        ndim = len(_nodes.shape(args[0]) or ())
        if name in SCALINGS and scaling_factor(name, [args[0], *map(_nodes.value, args[1:])], ndim) is None:
            return None
        before, after = _nodes.shape(args[0]), _nodes.shape(node)
        if before is None or after is None:
            return None
        axis = carried_axis(name, args, before, after, state.axis)
        return None if axis is None else state._replace(axis=axis)

    def _state(self, operand: object) -> State | None:
        return self.states.get(operand) if isinstance(operand, fx.Node) else None
