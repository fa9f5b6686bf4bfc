"""Find the residual chains of a graph and who reads which of their states.

Before::

    %h  = embedding(...)                                    no node is special
    %n  = layer_norm(%h)      %f = linear(%n)      %a = add(%h, %f)
    %n2 = layer_norm(%a)      %g = linear(%n2)     %b = add(%a, %g)
    %y  = layer_norm(%b)

After (data; the graph is unchanged)::

    chain: source %h, pushes %a (1) and %b (2), readers {0: [%n], 1: [%n2], 2: [%y]}

The streams are followed with the arithmetic of ``attnres_compile.stream``: what a live stream would do at an
operation is what the chain records there. A module that only reads is a boundary: it receives one read for all of
its operations. Leaves alone sums that continue no stream, and chains of fewer than two sublayers (refused).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container
from dataclasses import dataclass

from torch import fx

from attnres_compile.arithmetic import METADATA
from attnres_compile.chains import Refusal, ResidualChain
from attnres_compile.passes import _nodes, residual_sums, starts
from attnres_compile.passes.base import Subject
from attnres_compile.passes.follow import Boundaries, follow

NORMS = frozenset({"layer_norm", "rms_norm", "batch_norm", "group_norm", "native_layer_norm", "LayerNorm", "RMSNorm"})
NO_BOUNDARY = (
    "the source is made and consumed inside one function with no module boundary between, where a live module cannot "
    "start a stream; transform the exported program instead (torch.export.export, then attnres_compile.transform)"
)
NO_ADD = (
    "no residual add: no sum has a term that is computed, through a weight, from another one (there are no skips, or "
    "they are concatenated, or mixed by matrices)"
)
UNUSED = "nothing that reads the stream reaches the output"
DETACHED = "what reads the stream reaches the output through `detach` only, and its queries would get no gradient"
GATED = (
    "the skip is multiplied by a tensor (a gate, or one weight per feature) before the add, and only a single number "
    "is carried as a coefficient of the stream"
)
OTHER_CALL = (
    "the stream would start with {!r}, which is also called with another value, and hooks cannot tell the calls apart; "
    "give every visit a module of its own, or transform the exported program"
)
ACTIVATIONS = frozenset({"relu", "relu_", "gelu", "silu", "silu_", "tanh", "sigmoid", "hardswish", "leaky_relu", "elu"})


@dataclass(frozen=True)
class DetectChains:
    """Pass: see the module's text.

    Attributes:
        live: keep only chains that a live module can start, those whose source crosses a module boundary.
        outermost: a boundary is the outermost module that only reads; otherwise the innermost.
    """

    live: bool = False
    outermost: bool = True

    def __call__(self, subject: Subject) -> bool:
        """Find the chains and the refused candidates; True when there are others than before."""
        before = ([(chain.source, len(chain.pushes)) for chain in subject.chains], subject.refusals)
        used, trained = _reaching(subject.module), _reaching(subject.module, detached=False)

        def why_not(chain: ResidualChain) -> str | None:
            reason = None if used & _readers(chain) else UNUSED
            if self.live:
                reason = reason or (None if trained & _readers(chain) else DETACHED) or _no_start(chain, subject.module)
            return reason if subject.config.preserve else reason or _not_scale_invariant(chain, subject.module)

        chains, refusals = detect(subject.module, live=self.live, outermost=self.outermost, why_not=why_not)
        if ([(chain.source, len(chain.pushes)) for chain in chains], refusals) == before:
            return False
        subject.chains, subject.refusals = chains, refusals
        return True


def _reaching(module: fx.GraphModule, *, detached: bool = True) -> set[fx.Node]:
    """The nodes that an output depends on, through changes in place too; not ``detached``: with a gradient."""
    found: set[fx.Node] = set()
    memories: set[int | None] = set()
    for node in reversed(module.graph.nodes):
        if not detached and _nodes.name_of(node, module) == "detach":
            found.discard(node)
            continue
        changed = _nodes.changed(node, module)
        acts = node.is_impure() if changed is None else _nodes.memory(changed) in memories
        if node in found or node.op == "output" or acts:
            found.update((node, *node.all_input_nodes))
            memories.update(map(_nodes.memory, node.all_input_nodes))
    return found


def _readers(chain: ResidualChain) -> set[fx.Node]:
    return {node for position, nodes in chain.readers.items() if position for node in nodes}


def _no_start(chain: ResidualChain, module: fx.GraphModule) -> str | None:
    start = chain.start
    if start is None:
        return NO_BOUNDARY
    first, *later = dict.fromkeys(c.key for n in module.graph.nodes for c in _nodes.calls(n) if c.path == start.module)
    users = [push.node for push in chain.pushes]
    if start.side == "argument":
        users += (node for nodes in chain.readers.values() for node in nodes)
    entered = {call.key for node in users for call in _nodes.calls(node)}
    return None if first == start.call and entered.issuperset(later) else OTHER_CALL.format(start.module)


def _not_scale_invariant(chain: ResidualChain, module: fx.GraphModule) -> str | None:
    for readers in chain.readers.values():
        for reader in readers:
            if not _norms(reader, module):
                return (
                    f"preserve=False needs readers that are scale-invariant, and {reader.name} "
                    f"({_nodes.location(reader)}) is no norm; use preserve=True"
                )
    return None


def detect(
    module: fx.GraphModule,
    *,
    live: bool = False,
    outermost: bool = True,
    why_not: Callable[[ResidualChain], str | None] = lambda chain: None,
) -> tuple[list[ResidualChain], list[Refusal]]:
    """Chains in execution order, and what looked like one but is not.

    Args:
        module: the graph.
        live: the streams exist only behind the module boundaries where they start.
        outermost: as for ``DetectChains``.
        why_not: the reason to refuse a chain, or None.
    """
    sums = residual_sums.find(module)
    evidence = {add.node for add in sums.residual}
    sources = starts.sources(module, sums)
    chains = follow(module, sources, Boundaries({}, {}))
    for chain in chains:
        # A live model can start a stream only where a value crosses a module boundary.
        if chain.start is None and chain.pushes and (moved := starts.upstream(chain, module)) is not None:
            sources = {**sources, moved[0]: moved[1]}
    kept = _with_boundaries(module, sources, evidence, outermost)
    refusals: list[Refusal] = []
    pushed: set[fx.Node] = set()
    for chain in kept:
        chain.start = starts.at_output(chain) or chain.start
    settled = not (live and any(_is_used_before(chain) for chain in kept))
    while True:
        # What a refused stream passes through must not count: the others are followed alone.
        left = []
        for chain in kept:
            reason = why_not(chain) if chain.sublayers >= 2 else ""
            if reason is None:
                left.append(chain)
            elif reason:
                first = chain.pushes[0].node
                refusals.append(Refusal(reason, first.name, _nodes.location(first)))
                pushed.update(push.node for push in chain.pushes)
        if settled and len(left) == len(kept):
            break
        sources = {chain.source: starts.Source(chain.axis, chain.start) for chain in left}
        kept = _with_boundaries(module, sources, evidence, outermost, live=live)
        settled = True
    for chain in kept:
        chain.start = starts.at_output(chain) or chain.start
        _anchor(chain)
        pushed.update(push.node for push in chain.pushes)
    refusals = [
        Refusal(_why_not(add.node, module), add.node.name, _nodes.location(add.node))
        for add in sums.residual
        if add.node not in pushed and add.root not in evidence
    ] + refusals
    # Beside other chains a single gate is more likely a part of a branch.
    gated = sums.gated_in_a_row if kept else sums.gated
    refusals += [Refusal(GATED, node.name, _nodes.location(node)) for node in gated if node not in pushed]
    if not kept and not refusals:
        refusals = [Refusal(NO_ADD, "output", "in the whole graph")]
    return kept, refusals


def _with_boundaries(
    module: fx.GraphModule,
    sources: dict[fx.Node, starts.Source],
    evidence: set[fx.Node],
    outermost: bool,
    *,
    live: bool = False,
) -> list[ResidualChain]:
    """Follow the streams, with the modules that only read as boundaries where no push is lost by that."""
    free = follow(module, sources, Boundaries({}, {}), live=live)
    essential = [chain.main_path(evidence) for chain in free]
    for outer in dict.fromkeys((outermost, False)):
        boundaries = Boundaries.around(free, essential, outermost=outer)
        bounded = follow(module, sources, boundaries, live=live)
        kept = {chain.source: {push.node for push in chain.pushes} for chain in bounded}
        if all(main <= kept.get(chain.source, set()) for chain, main in zip(free, essential, strict=True)):
            return bounded
    return follow(module, sources, Boundaries.exits(free), live=live)


def _is_used_before(chain: ResidualChain) -> bool:
    """Whether the source has uses where a live stream has not started."""
    return chain.start is not None and any(not starts.sees(chain.start, user) for user in chain.source.users)


def _anchor(chain: ResidualChain) -> None:
    """Record for each module inside the container at which positions the stream enters it, visit by visit."""
    entries: dict[str, dict[str, int]] = defaultdict(dict)
    for push in chain.pushes:
        stack = _nodes.calls(push.node)
        depth = next((i for i, call in enumerate(stack) if call.path == chain.container), 0)
        for call in stack[depth + 1 :]:
            entries[call.path].setdefault(call.key, chain.entries.get(call.key, push.position - 1))
    chain.anchors = {path: tuple(sorted(visits.values())) for path, visits in entries.items()}


def _why_not(add: fx.Node, module: fx.GraphModule) -> str:
    readers = [node for node in _first_readers(add, module) if _nodes.name_of(node, module) not in METADATA]
    following = {_nodes.name_of(reader, module) for reader in readers}
    around = {call.key for call in _nodes.calls(add)}
    if readers and all(_norms(reader, module, around) for reader in readers):
        return "post-norm: the sum is normalised before the next add, so no residual stream goes on"
    if following & ACTIVATIONS:
        return "activation after the add: the sum passes through it before the next add, so no residual stream goes on"
    return f"the stream ends after one sublayer; it is read next by {', '.join(sorted(following)) or 'nothing'}"


def _norms(node: fx.Node, module: fx.GraphModule, around: Container[str] = ()) -> bool:
    """Whether a node is a norm, or in a module named after one; those ``around`` hold more than a norm."""
    stack = _nodes.calls(node)
    inside = stack and stack[-1].key not in around and "norm" in stack[-1].kind.lower()
    return bool(_nodes.name_of(node, module) in NORMS or inside)


def _first_readers(node: fx.Node, module: fx.GraphModule) -> list[fx.Node]:
    """The users of a node, looked for behind what only passes it on."""
    found: list[fx.Node] = []
    for user in node.users:
        passes_on = residual_sums.carried_input(user, module) is node
        found += _first_readers(user, module) if passes_on else [user]
    return found
