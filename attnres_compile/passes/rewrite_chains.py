"""Rewrite chains into block partial sums and depth-attention nodes.

Before::

    %a = add(%h, %f)        %n2 = layer_norm(%a)
    %b = add(%a, %g)        %y  = layer_norm(%b)

After, with ``block_size=1``::

    %q  = select(%attnres_0_query, 0, 0)    %k  = select(%attnres_0_key_norm, 0, 0)
    %r1 = depth_attention([%h, %f], %q, %k, eps, 2.0)        %n2 = layer_norm(%r1)
    ...
    %r2 = depth_attention([%h, %f, %g], %q1, %k1, eps, 3.0)  %y  = layer_norm(%r2)

Where a block has several reads of several finished blocks, they are one ``inter_block`` and a ``merge`` each.
Assumes planned chains and a functional graph around them. Leaves every other node as it is, with its meta.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from attnres_compile.arithmetic import METADATA
from attnres_compile.chains import ResidualChain
from attnres_compile.errors import RefusedError
from attnres_compile.interface import dispatch
from attnres_compile.passes import _nodes
from attnres_compile.passes._emit import STAMP, method, stamp
from attnres_compile.passes.base import Subject
from attnres_compile.passes.follow import EXIT, changes_nothing
from attnres_compile.stream import Stream, is_stream, map_streams

Parameters = tuple[fx.Node, fx.Node | None]


@dataclass(frozen=True)
class RewriteChains:
    """Pass: see the module's text.

    Attributes:
        parameters: gives a planned chain its nodes for ``query`` and ``key_norm``, before any other node uses them.
    """

    parameters: Callable[[fx.GraphModule, ResidualChain], Parameters]

    def __call__(self, subject: Subject) -> bool:
        """Rewrite the planned chains; they are no chains afterwards."""
        chains = [chain for chain in subject.chains if chain.plan is not None]
        if not chains:
            return False
        parameters = [self.parameters(subject.module, chain) for chain in chains]
        subject.module.graph = _Rewriter(subject.module, chains, parameters).run()
        subject.chains = []
        return True


class _Emitter(fx.proxy.GraphAppendingTracer):
    """Appends nodes with fake values, stamped with this pass and with the place of the node that they replace."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(graph)
        self.replacing: fx.Node | None = None

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, target, *args, **kwargs)
        stamp(node, "rewrite_chains", self.replacing)
        return node


class _Rewriter:
    def __init__(self, module: fx.GraphModule, chains: list[ResidualChain], parameters: list[Parameters]) -> None:
        self.module, self.graph = module, fx.Graph()
        self.chains = {chain.plan.chain: chain for chain in chains if chain.plan is not None}
        self.sources = {chain.source: chain for chain in chains}
        self.parameters = dict(zip(self.chains, parameters, strict=True))
        self.emitter = _Emitter(self.graph)
        self.values: dict[fx.Node, Any] = {}
        self.order = {node: i for i, node in enumerate(module.graph.nodes)}
        # Per memory the last node that changed it in place.
        self.changes: dict[int | None, fx.Node] = {}
        self.reads: dict[tuple[int, str], Any] = {}
        self.alive: list[Stream] = []  # keeps the keys of ``reads`` unique

    def run(self) -> fx.Graph:
        """The rewritten graph."""
        self.graph.set_codegen(self.module.graph._codegen)
        for node in self.module.graph.nodes:
            self.emitter.replacing = node
            value = self._visit(node)
            if node in self.sources and not is_stream(value):
                value = self._start(self.sources[node], value)
            self._note_change(node, value)
            self.values[node] = value
        for node in reversed(self.graph.nodes):
            if STAMP in node.meta and not node.users and _nodes.changed(node, self.module) is None:
                self.graph.erase_node(node)
        return self.graph

    def _start(self, chain: ResidualChain, value: fx.Proxy) -> Stream:
        assert chain.plan is not None
        query, key_norm = (None if node is None else self.values[node] for node in self.parameters[chain.plan.chain])
        reads: Any = SimpleNamespace(query=query, key_norm=key_norm)
        return Stream((value,), None, None, 0, chain.axis, chain.plan, reads)

    def _visit(self, node: fx.Node) -> Any:
        self._refuse_changed(node)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._held)
        args, kwargs = _open(args), _open(kwargs)
        if not any(is_stream(self.values[source]) for source in node.all_input_nodes):
            return self._copy(node, args, kwargs)
        if node.op != "output" and changes_nothing(node, self.module):
            return args[0]
        name = _nodes.name_of(node, self.module)
        if name.startswith("_assert"):
            return None
        args, kwargs = map_streams((args, kwargs), lambda s: self._at_boundary(node, s))
        if name in METADATA:
            return self._copy(node, *map_streams((args, kwargs), lambda s: s.blocks[0]))
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=is_stream)
        nested = node.op == "call_module" or isinstance(node.target, torch._ops.HigherOrderOperator)
        if nested or not any(map(is_stream, leaves)):
            return self._copy(node, *map_streams((args, kwargs), Stream.read))
        target = method(str(node.target)) if node.op == "call_method" else node.target
        try:
            return dispatch(target, name, tuple(args), dict(kwargs))
        except RefusedError as error:
            raise RefusedError(f"{error} ({_nodes.location(node)})") from error

    def _refuse_changed(self, node: fx.Node) -> None:
        """A node must not use what was changed in place under another name, where one of the names is a stream."""
        for source in node.all_input_nodes:
            changed = self.changes.get(_nodes.memory(source))
            if changed is not None and self.order[source] < self.order[changed]:
                raise RefusedError(
                    "the residual stream, or a branch that it keeps, was changed in place (by an in-place "
                    f"`{_nodes.name_of(changed, self.module)}`) and its memory is used afterwards under another name; "
                    f"rebind the result (`x = x + f(x)`) and keep no second name for the stream "
                    f"({_nodes.location(node)}, changed at {_nodes.location(changed)})"
                )

    def _note_change(self, node: fx.Node, result: Any) -> None:
        """Remember whose memory a node changes in place: a stream's own, or that of a tensor that streams keep."""
        changed = _nodes.changed(node, self.module)
        memory = None if changed is None else _nodes.memory(changed)
        if memory is None or changes_nothing(node, self.module):
            return
        for other, value in self.values.items():
            held = _nodes.memory(other)
            if is_stream(value) and memory in (held, *map(_memory, (*value.blocks, value.partial))):
                self.changes[held] = node
        if is_stream(result):
            self.changes[memory] = node

    def _held(self, node: fx.Node) -> Any:
        return _Held(self.values[node])

    def _at_boundary(self, node: fx.Node, stream: Stream) -> Any:
        chain = self.chains[stream.plan.chain]
        key = EXIT if node.op == "output" else chain.boundaries.get(node)
        if key is None:
            return stream
        if (id(stream), key) not in self.reads:
            leaves_early = key == EXIT and stream.position != stream.plan.last
            self.reads[id(stream), key] = stream.total() if leaves_early else stream.read()
            self.alive.append(stream)
        return self.reads[id(stream), key]

    def _copy(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Proxy:
        copy = self.graph.node_copy(node, lambda n: n)
        copy.args, copy.kwargs = fx.node.map_aggregate((args, kwargs), _node)
        return fx.Proxy(copy, self.emitter)


class _Held:
    """Carries a value through ``map_arg``, which would copy the containers of a proxy or a stream."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _open(value: Any) -> Any:
    return fx.node.map_aggregate(value, lambda leaf: leaf.value if isinstance(leaf, _Held) else leaf)


def _memory(value: Any) -> int | None:
    return None if value is None else _nodes.memory(value.node)


def _node(value: Any) -> Any:
    return value.node if isinstance(value, fx.Proxy) else value
