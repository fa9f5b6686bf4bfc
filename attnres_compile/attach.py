"""Attach a plan to a live module: hooks at module boundaries turn the residual tensor into a stream and back.

No code is generated and no trace is kept: the user's own Python runs. Hooks are picklable objects that look the
parameters up on the root module when they run, so that copies of the model follow their own.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from attnres_compile.chains import BlockPlan
from attnres_compile.reads import ChainReads, DepthReads
from attnres_compile.saved_reads import keep_merges, stop_keeping
from attnres_compile.stream import Stream, is_stream, map_streams, refuse_reentrant, replace_leaves, start

ATTRIBUTE = "attnres"
Key = int | str


@dataclass(frozen=True)
class Place:
    """Where a tensor is among a call's arguments, or in its output.

    Attributes:
        parameter: name of the parameter of ``forward``, so that positional and keyword calls are the same; None for
            an output.
        index: position among the positional arguments.
        path: keys that lead from the argument (or the output) to the tensor.
    """

    parameter: str | None
    index: int | None
    path: tuple[Key, ...]


@dataclass(frozen=True)
class Attachment:
    """Everything that a live module needs to carry one chain; plain data without graph nodes.

    Attributes:
        plan: how the chain is cut into blocks.
        width: features of a source.
        axis: the feature axis, counted from the end.
        module: path of the module at whose boundary the stream starts.
        place: the argument, or the part of the output, that is the source.
        output: whether the source is an output.
        anchors: per module path the positions at which the stream enters it, one per visit.
        readers: paths of the modules that only read: they receive the mix as a plain tensor.
        exits: paths of the modules that the stream does not leave.
        later: the modules like the first one, and their positions: they start the stream when it was left out.
    """

    plan: BlockPlan
    width: int
    axis: int
    module: str
    place: Place
    output: bool
    anchors: tuple[tuple[str, tuple[int, ...]], ...]
    readers: tuple[str, ...]
    exits: tuple[str, ...]
    later: tuple[tuple[str, int], ...] = ()


def attach(model: nn.Module, attachments: list[Attachment], *, key_norm: bool) -> None:
    """Give a model its reads (``model.attnres``) and the hooks that carry its streams. Changes the model itself."""
    guard_hooks()
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    device, dtype = (parameter.device, parameter.dtype) if parameter is not None else (None, None)
    reads = [DepthReads(a.plan.reads, a.width, key_norm=key_norm, device=device, dtype=dtype) for a in attachments]
    model.add_module(ATTRIBUTE, ChainReads(reads))
    # Each goes before the user's own hooks, which belong to the layer; so the last registered, the start, is first.
    for attachment in attachments:
        chain = attachment.plan.chain
        for path in attachment.readers:
            reader = model.get_submodule(path)
            reader.register_forward_pre_hook(_ReadAtEntry(chain), prepend=True, with_kwargs=True)
            reader.register_forward_hook(_ReadDone(chain), always_call=True)
        for path, positions in attachment.anchors:
            hook = _Anchor(chain, positions)
            model.get_submodule(path).register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        for path in attachment.exits:
            model.get_submodule(path).register_forward_hook(_Exit(chain), prepend=True)
    for attachment in attachments:
        _attach_start(model, attachment)


def guard_hooks() -> None:
    """Let Dynamo tell a model with hooks from one without.

    By default it takes hooks for static: code that it compiled for the original would run for the transformed model.
    What was compiled so far is dropped, once, since it does not look.
    """
    if torch._dynamo.config.skip_nnmodule_hook_guards:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch._dynamo.reset_code_caches()


def is_attached(model: nn.Module) -> bool:
    """Whether some module of the model carries streams already."""
    hooks = (hook for m in model.modules() for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values()))
    return any(isinstance(hook, _Hook | _StartOutput) for hook in hooks)


def _attach_start(model: nn.Module, attachment: Attachment) -> None:
    for path, position in ((attachment.module, 0), *attachment.later):
        module = model.get_submodule(path)
        hook = _Start(attachment.plan.chain, model, attachment.place, attachment.plan, attachment.axis, position)
        if attachment.output:
            module.register_forward_hook(_StartOutput(hook))
        else:
            module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)


@dataclass(eq=False)
class _Hook:
    chain: int

    def __setstate__(self, state: dict[str, Any]) -> None:
        guard_hooks()
        self.__dict__.update(state)


@dataclass(eq=False)
class _Start(_Hook):
    root: nn.Module
    place: Place
    plan: BlockPlan
    axis: int
    position: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.position and _latest((args, kwargs), self.chain) is not None:
            return None
        place, source = self.place, None
        if place.parameter is not None and place.parameter in kwargs:
            source = at_path(kwargs[place.parameter], place.path)
        elif place.index is not None and place.index < len(args):
            source = at_path(args[place.index], place.path)
        stream = self.start(source)
        if stream is source:
            return None
        # The same tensor may come in twice (a second stream that starts equal, a state kept for re-injection).
        return None if source is None else _swapped((args, kwargs), source, stream)

    def start(self, value: Any) -> Any:
        """The stream that starts with ``value``, unless it is one already or no tensor of that width."""
        if is_stream(value) or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        reads: Any = self.root.get_submodule(ATTRIBUTE)[self.chain]  # type: ignore[index]
        if value.ndim < 2 or value.shape[self.axis] != reads.query.shape[-1]:
            return value
        refuse_reentrant(self.root.training or value.requires_grad)
        traced = not torch.compiler.is_compiling() and _compiled_in_parts(self.root)
        return start(value, self.axis, self.plan, reads, traced=traced).at(self.position)


@dataclass(eq=False)
class _StartOutput:
    """A start whose source is what the module returns."""

    hook: _Start

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        source = at_path(output, self.hook.place.path)
        stream = self.hook.start(source)
        return None if stream is source else _swapped(output, source, stream)


@dataclass(eq=False)
class _Anchor(_Hook):
    """Puts a stream that enters a module where the plan has it, so that skipped layers do not shift the rows."""

    positions: tuple[int, ...]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        latest = _latest((args, kwargs), self.chain)
        if latest is None:
            return None
        refuse_reentrant(module.training or any(source.requires_grad for source in latest.sources))
        position = next((p for p in self.positions if p >= latest.position), self.positions[-1])
        if position == latest.position:
            return None
        before = latest.position

        def at(stream: Stream) -> Stream:
            ours = stream.plan.chain == self.chain and stream.position == before
            return stream.at(position) if ours else stream

        return map_streams((args, kwargs), at)


@dataclass(eq=False)
class _ReadAtEntry(_Hook):
    """Hands a module that only reads the mix, once for all of its operations."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reads: list[Tensor] = []

        def read(stream: Stream) -> Any:
            if stream.plan.chain != self.chain:
                return stream
            reads.append(stream.read())
            return reads[-1]

        swapped = map_streams((args, kwargs), read)
        if not torch.compiler.is_compiling() and reads:
            keep_merges(reads)
        return swapped


@dataclass(eq=False)
class _ReadDone(_Hook):
    """The reader has what it keeps for its backward."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling():
            stop_keeping()


@dataclass(eq=False)
class _Exit(_Hook):
    """Lets no stream out of the module that holds the chain: the final state is read, others are running sums."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        # One tensor for each state, however many names it leaves under: they go on sharing their memory.
        gone: list[tuple[Stream, Any]] = []

        def leave(stream: Stream) -> Any:
            for state, value in gone:
                if state is stream:
                    return value
            gone.append((stream, self.leave(stream)))
            return gone[-1][1]

        left = map_streams(output, leave)
        # An unchanged output is not handed back: Dynamo would compile a graph for it.
        return None if left is output else left

    def leave(self, stream: Stream) -> Any:
        if stream.plan.chain != self.chain:
            return stream
        return stream.read() if stream.position == stream.plan.last else stream.total()


def _compiled_in_parts(module: nn.Module) -> bool:
    """Whether a part was compiled by itself: Dynamo would wrap a tensor subclass around its empty tensor.

    Asked at every start, since a part may be compiled at any time: ``module.modules()`` is several times as slow.
    """
    if module._compiled_call_impl is not None or "forward" in vars(module):
        return True
    return any(child is not None and _compiled_in_parts(child) for child in module._modules.values())


def _latest(value: Any, chain: int) -> Stream | None:
    found: list[Stream] = []

    def collect(stream: Stream) -> Stream:
        if stream.plan.chain == chain:
            found.append(stream)
        return stream

    map_streams(value, collect)
    latest = None
    for stream in found:
        if latest is None or stream.position > latest.position:
            latest = stream
    return latest


def at_path(value: Any, path: tuple[Key, ...]) -> Any:
    """The part of nested tuples, lists and dicts that the keys lead to, or None."""
    for key in path:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list | tuple) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value


def _swapped(value: Any, old: Tensor, new: Stream) -> Any:
    return replace_leaves(value, lambda leaf: isinstance(leaf, Tensor) and leaf is old, lambda leaf: new)


def places(value: Any, path: tuple[Key, ...] = ()) -> list[tuple[tuple[Key, ...], Tensor]]:
    """Every tensor in nested tuples, lists and dicts, with the keys that lead to it."""
    if isinstance(value, Tensor):
        return [(path, value)]
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in places(item, (*path, key))]
    if isinstance(value, list | tuple):
        return [found for i, item in enumerate(value) for found in places(item, (*path, i))]
    return []


def argument_places(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Place, Tensor]]:
    """Every tensor among a call's arguments, with its place."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in kinds]
    found = [
        (Place(names[i] if i < len(names) else None, i, path), tensor)
        for i, arg in enumerate(args)
        for path, tensor in places(arg)
    ]
    for name, arg in kwargs.items():
        index = names.index(name) if name in names else None
        found += [(Place(name, index, path), tensor) for path, tensor in places(arg)]
    return found
