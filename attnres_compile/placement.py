"""From the chains of a graph to attachments on the live module that the graph was traced from."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from attnres_compile.attach import Attachment, Place, argument_places, places
from attnres_compile.capture.copies import shared_copy
from attnres_compile.capture.inputs import Inputs
from attnres_compile.capture.trace import Captured
from attnres_compile.chains import ResidualChain
from attnres_compile.errors import RefusedError
from attnres_compile.passes import _nodes
from attnres_compile.passes.follow import EXIT

Seen = list[tuple[Place, Tensor]]


def attachments(model: nn.Module, captured: Captured, chains: list[ResidualChain], inputs: Inputs) -> list[Attachment]:
    """One attachment per planned chain.

    The graph tells at which module a stream starts; which argument it is, the values tell: the graph and the model
    run once on the example inputs.

    Raises:
        RefusedError: a chain's source is not found among the values that cross its module's boundary.
    """
    values = _source_values(captured, [chain.source for chain in chains])
    reading = {path: None for chain in chains for path in _readers(chain)}
    seen, handing_on = _crossing_values(shared_copy(model), chains, reading, inputs)
    keys = {call for node in captured.module.graph.nodes for call in _nodes.calls(node)}
    calls = Counter(call.path for call in keys)
    found = []
    for chain in chains:
        assert chain.start is not None and chain.plan is not None
        place = _nearest(values[chain.source], seen[chain.start.module, chain.start.side])
        if place is None:
            raise RefusedError(
                f"the source of a chain ({chain.source.name}, {_nodes.location(chain.source)}) is not among the "
                f"tensors that cross the boundary of {chain.start.module or 'the model'!r}; pass it as an argument"
            )
        readers = tuple(path for path in _readers(chain) if path not in handing_on)
        found.append(_attachment(model, chain, place, calls, readers))
    return found


def _readers(chain: ResidualChain) -> dict[str, None]:
    """Paths of the modules that read the chain at their entry."""
    inner = ((node, key) for node, key in chain.boundaries.items() if key != EXIT)
    return {next(call.path for call in _nodes.calls(node) if call.key == key): None for node, key in inner}


def _attachment(
    model: nn.Module, chain: ResidualChain, place: Place, calls: Counter[str], readers: tuple[str, ...]
) -> Attachment:
    assert chain.start is not None and chain.plan is not None
    # A module registered under several names is one module, whose visits are all of theirs.
    visits: dict[nn.Module, tuple[str, list[int]]] = {}
    for path, positions in chain.anchors.items():
        visits.setdefault(model.get_submodule(path), (path, []))[1].extend(positions)
    pushing = set(visits)
    first = model.get_submodule(chain.start.module)
    depth = chain.start.module.count(".") if chain.start.module else -1
    later = [
        (path, min(positions))
        for module, (path, positions) in visits.items()
        if type(module) is type(first)
        and module is not first
        and chain.start.side == "argument"
        # Called without the stream as well, it would start another one.
        and path.count(".") == depth
        and len(positions) == calls[path]
    ]
    parts = chain.container.split(".") if chain.container else []
    return Attachment(
        plan=chain.plan,
        width=chain.width,
        axis=chain.axis,
        module=chain.start.module,
        place=place,
        output=chain.start.side == "output",
        anchors=tuple((path, tuple(sorted(positions))) for path, positions in visits.values()),
        readers=tuple(path for path in readers if model.get_submodule(path) not in pushing),
        exits=tuple(".".join(parts[:i]) for i in range(len(parts), -1, -1)),
        later=tuple(later),
    )


class _Found(Exception):
    pass


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, wanted: list[fx.Node]) -> None:
        super().__init__(module)
        self.wanted, self.found = set(wanted), dict[fx.Node, Any]()

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self.wanted:
            self.found[n] = value.detach().clone()
            if len(self.found) == len(self.wanted):
                raise _Found
        return value


def _source_values(captured: Captured, sources: list[fx.Node]) -> dict[fx.Node, Tensor]:
    recorder = _Recorder(captured.module, sources)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        with contextlib.suppress(_Found):
            recorder.run(*_fresh(captured))
    return recorder.found


def _fresh(captured: Captured) -> list[Any]:
    """The graph's inputs with copies of the user's tensors: a model may change its inputs in place."""
    placeholders = [node for node in captured.module.graph.nodes if node.op == "placeholder"]
    both = zip(placeholders, captured.inputs, strict=True)
    return [v.clone() if isinstance(v, Tensor) and not n.meta.get("is_parameter") else v for n, v in both]


def _crossing_values(
    model: nn.Module, chains: list[ResidualChain], reading: Iterable[str], inputs: Inputs
) -> tuple[dict[tuple[str, str], Seen], set[str]]:
    """The tensors that cross the boundaries of starts, and which readers return a tensor that they were given.

    In the graph the stream goes round such a reader; a live one would hand the mix on in its place.
    """
    handing_on: set[str] = set()
    for path in reading:
        _note_same(model.get_submodule(path), path, handing_on)
    seen: dict[tuple[str, str], Seen] = defaultdict(list)
    for chain in chains:
        assert chain.start is not None
        key = (chain.start.module, chain.start.side)
        if key not in seen:
            seen[key] = []
            _record(model.get_submodule(chain.start.module), chain.start.side, seen[key])
    model.eval()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        args, kwargs = inputs.fresh()
        model(*args, **kwargs)
    return seen, handing_on


def _note_same(module: nn.Module, path: str, into: set[str]) -> None:
    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = {id(tensor) for _, tensor in places((args, kwargs))}
        if any(id(tensor) in given for _, tensor in places(output)):
            into.add(path)

    module.register_forward_hook(compare, with_kwargs=True)


def _record(module: nn.Module, side: str, into: Seen) -> None:
    def arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        into.extend((place, tensor.detach().clone()) for place, tensor in argument_places(module, args, kwargs))

    def outputs(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        into.extend((Place(None, None, path), tensor.detach().clone()) for path, tensor in places(output))

    register: dict[str, Callable[[], object]] = {
        "argument": lambda: module.register_forward_pre_hook(arguments, with_kwargs=True),
        "output": lambda: module.register_forward_hook(outputs),
    }
    register[side]()


def _nearest(value: Tensor, candidates: Seen) -> Place | None:
    """Where the values nearest to the source's cross the boundary in most calls; the first of equals."""
    distances = [
        (place, float((tensor.double() - value.double()).abs().max()) if tensor.numel() else 0.0)
        for place, tensor in candidates
        if tensor.shape == value.shape and tensor.is_floating_point()
    ]
    least = min((distance for _, distance in distances), default=0.0)
    places = Counter(place for place, distance in distances if distance == least)
    return max(places, key=places.__getitem__, default=None)
