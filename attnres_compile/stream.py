"""The residual stream as a value: an add pushes a source, everything else reads the depth-attention mix.

The same arithmetic serves live tensors and, with ``torch.fx.Proxy`` sources, the rewriting of graphs.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from attnres_compile.arithmetic import (
    CASTS,
    DROPOUTS,
    METADATA,
    ROW_MAJOR,
    SCALINGS,
    UNCHANGED,
    Addition,
    as_addition,
    carried_axis,
    operation_name,
    scaling_factor,
)
from attnres_compile.chains import BlockPlan
from attnres_compile.errors import RefusedError
from attnres_compile.reads import ReadParameters

aten = torch.ops.aten
ops = torch.ops.attnres_compile

Value = Any  # a tensor, or a proxy for one
NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


class Phase(NamedTuple):
    """Phase-1 statistics of the finished blocks, for the reads from row ``first``."""

    first: int
    o: tuple[Value, ...]
    m: tuple[Value, ...]
    l: tuple[Value, ...]


class Observer:
    """Collects what happens to the streams while it is set: pushes per chain, rows read, dtypes pushed."""

    active: Observer | None = None

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.pushes: dict[int, int] = {}
        self.rows: set[tuple[int, int]] = set()
        self.dtypes: set[torch.dtype] = set()

    def __enter__(self) -> Observer:
        Observer.active = self
        return self

    def __exit__(self, *_: object) -> None:
        Observer.active = None


def example(value: Value) -> Any:
    """The tensor, or the fake tensor that a proxy stands for."""
    return value.node.meta["val"] if isinstance(value, fx.Proxy) else value


@dataclass(eq=False)
class Stream:
    """One state of a residual stream. Immutable: every operation returns another value.

    Attributes:
        blocks: ``b_0`` and the sums of the finished blocks, ``[..., d]`` each.
        partial: sum of the open block's branches so far, None at its start.
        phase: phase-1 statistics of the open block's reads, where they pay.
        position: pushes since the source.
        axis: the feature axis, counted from the end.
        plan: how the chain is cut into blocks.
        reads: the chain's parameters.
    """

    blocks: tuple[Value, ...]
    partial: Value | None
    phase: Phase | None
    position: int
    axis: int
    plan: BlockPlan
    reads: ReadParameters
    stale: str = ""

    @property
    def sources(self) -> tuple[Value, ...]:
        """The finished blocks, and the partial sum if there is one."""
        blocks = self.current().blocks
        return blocks if self.partial is None else (*blocks, self.partial)

    def _with(self, blocks: tuple[Value, ...], partial: Value | None, phase: Phase | None, **changed: Any) -> Stream:
        position, axis = changed.get("position", self.position), changed.get("axis", self.axis)
        return type(self)(blocks, partial, phase, position, axis, self.plan, self.reads)

    def current(self) -> Stream:
        """This state, unless it was changed in place since.

        Raises:
            RefusedError: the old value of an in-place add is used afterwards.
        """
        if self.stale:
            raise RefusedError(
                f"the residual stream was changed in place ({self.stale}) and the old value is used afterwards; "
                "rebind the result (`x = x + f(x)`) and keep no second name for the stream"
            )
        return self

    def push(self, branch: Value) -> Stream:
        """The state after adding ``branch``, a tensor that broadcasts to the stream's shape, or a number."""
        position, partial, blocks = self.position + 1, self.partial, self.blocks
        if partial is not None:
            partial = aten.add.Tensor(partial, branch)
        elif isinstance(branch, NUMBERS):
            partial = aten.full_like.default(blocks[0], branch)
        else:
            partial = branch if _same_shape(branch, blocks[0]) else aten.expand_as.default(branch, blocks[0])
        ours, theirs = example(blocks[0]).dtype, example(partial).dtype
        if ours != theirs:
            common = torch.promote_types(ours, theirs)
            partial = partial if theirs == common else aten.to.dtype(partial, common)
            blocks = blocks if ours == common else tuple(aten.to.dtype(block, common) for block in blocks)
        if Observer.active is not None:
            Observer.active.pushes[self.plan.chain] = Observer.active.pushes.get(self.plan.chain, 0) + 1
            Observer.active.dtypes.add(theirs)
        phase = self.phase if blocks is self.blocks else None
        after = self._with(blocks, partial, phase, position=position)
        return after._closed() if position <= self.plan.last and self.plan.closes[position] else after

    def at(self, position: int) -> Stream:
        """The same state where the plan has it at ``position``: rows do not shift when layers are skipped."""
        if position == self.position:
            return self
        moved = self._with(self.blocks, self.partial, self.phase, position=position)
        crossed = any(self.plan.closes[self.position + 1 : position + 1])
        return moved._closed() if crossed else moved

    def _closed(self) -> Stream:
        blocks = self.sources
        first, stop = self.plan.phase_rows[self.position]
        # One finished block is read as cheaply with the partial sum; one read has nothing to share.
        if len(blocks) < 2 or stop - first < 2:
            return self._with(blocks, None, None)
        queries = aten.slice.Tensor(self.reads.query, 0, first, stop)
        key_norms = None if self.reads.key_norm is None else aten.slice.Tensor(self.reads.key_norm, 0, first, stop)
        o, m, l = ops.inter_block.default([_last(b, self.axis) for b in blocks], queries, key_norms, self.plan.eps)
        rows = [tuple(_unbound(value, stop - first)) for value in (o, m, l)]
        return self._with(blocks, None, Phase(first, *rows))

    def read(self) -> Value:
        """The depth-attention mix at this position; the running sum where the plan has no read."""
        row = self.plan.rows[self.position] if self.position <= self.plan.last else -1
        sources = self.sources
        if row < 0 or len(sources) == 1:
            return self.total()
        if Observer.active is not None:
            Observer.active.rows.add((self.plan.chain, row))
        scale, eps = float(len(sources)) if self.plan.preserve else 1.0, self.plan.eps
        key_norm = None if self.reads.key_norm is None else aten.select.int(self.reads.key_norm, 0, row)
        query, phase = aten.select.int(self.reads.query, 0, row), self.phase
        if phase is not None and phase.first <= row < phase.first + len(phase.o):
            i = row - phase.first
            statistics = phase.o[i], phase.m[i], phase.l[i]
            if self.partial is None:
                h = ops.merge.default(*statistics, None, None, None, eps, scale)
                h = h if example(h).dtype == self.dtype else aten.to.dtype(h, self.dtype)
            else:
                h = ops.merge.default(*statistics, _last(self.partial, self.axis), query, key_norm, eps, scale)
        else:
            h = ops.depth_attention.default([_last(v, self.axis) for v in sources], query, key_norm, eps, scale)
        return h if self.axis == -1 else aten.movedim.int(h, -1, self.axis)

    def total(self) -> Value:
        """The standard residual stream: the sum of all sources."""
        total, *others = self.sources
        for other in others:
            total = aten.add.Tensor(total, other)
        return total

    def map(self, function: Callable[[Value], Value], axis: int, *, row_major: bool = False) -> Stream:
        """The stream whose sources went through ``function``, which is linear and acts on every token alike."""
        blocks = tuple(function(block) for block in self.blocks)
        partial = None if self.partial is None else function(self.partial)
        phase = None
        if row_major and axis == -1 and self.phase is not None:
            token = aten.select.int(blocks[0], -1, 0)
            o = tuple(aten.reshape_as.default(row, blocks[0]) for row in self.phase.o)
            m, l = (tuple(aten.reshape_as.default(row, token) for row in rows) for rows in self.phase[2:])
            phase = Phase(self.phase.first, o, m, l)
        return self._with(blocks, partial, phase, axis=axis)

    @classmethod
    def __torch_function__(
        cls, target: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return dispatch(target, operation_name(target), tuple(args), dict(kwargs or {}))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(position={self.position}, blocks={len(self.blocks)}, shape={tuple(self.shape)})"

    def __len__(self) -> int:
        return len(self.blocks[0])

    @property
    def shape(self) -> torch.Size:
        """Shape of the stream."""
        return example(self.blocks[0]).shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stream."""
        return example(self.blocks[0]).dtype

    @property
    def device(self) -> torch.device:
        """Device of the stream."""
        return example(self.blocks[0]).device

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return int(example(self.blocks[0]).ndim)

    @property
    def requires_grad(self) -> bool:
        """Whether any source does."""
        return any(source.requires_grad for source in self.sources)


class TensorStream(Stream, torch.Tensor):
    """A stream for which ``isinstance(stream, torch.Tensor)`` holds, as user code between layers may ask.

    The tensor underneath is empty and never computed with. Tracers take the plain ``Stream``: they would want a
    proxy for that tensor.
    """

    def __new__(cls, *_: Any) -> TensorStream:
        """Make the empty tensor; the fields are set by ``Stream``."""
        return torch.Tensor._make_subclass(cls, torch.empty(0))


def start(value: Value, axis: int, plan: BlockPlan, reads: ReadParameters) -> Stream:
    """The stream at its source: ``value`` is ``b_0``."""
    kind = Stream if torch.compiler.is_compiling() else TensorStream
    return kind((value,), None, None, 0, axis, plan, reads)


def is_stream(value: object) -> bool:
    """Whether a value is a stream."""
    return isinstance(value, Stream)


def dispatch(target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an operation to arguments among which there is a stream."""
    for value in (*args, *kwargs.values()):
        if is_stream(value):
            value.current()
    addition = as_addition(name, args, kwargs)
    if addition is not None:
        pushed = _pushed(addition)
        if pushed is not None:
            return pushed
    elif name in METADATA:
        return target(*map_streams(args, lambda s: s.blocks[0]), **map_streams(kwargs, lambda s: s.blocks[0]))
    else:
        carried = _carried(target, name, args, kwargs)
        if carried is not None:
            return carried
    if args and is_stream(args[0]) and (name == "setitem" or (name.endswith("_") and not name.endswith("__"))):
        if name == "requires_grad_":
            for source in args[0].sources:
                source.requires_grad_(*args[1:], **kwargs)
            return args[0]
        raise RefusedError(f"`{name}` changes the residual stream in place{_caller()}; write it out of place")
    return target(*map_streams(args, Stream.read), **map_streams(kwargs, Stream.read))


def _pushed(addition: Addition) -> Stream | None:
    skip, branch = addition.skip, addition.branch
    if is_stream(branch) and addition.factor == 1 and (not is_stream(skip) or skip.position < branch.position):
        skip, branch = branch, skip
    if not is_stream(skip):
        return None
    if is_stream(branch) and branch.plan is not skip.plan:
        return None
    operand = Addition(skip, map_streams(branch, Stream.read), addition.factor, addition.product)
    value = operand.branch_value(lambda target, *args: target(*args))
    if isinstance(value, NUMBERS) and value == 0:
        return skip
    if not isinstance(value, NUMBERS) and not _broadcasts(value, skip):
        return None
    after = skip.push(value)
    if addition.in_place and skip is addition.skip:
        skip.stale = f"by an in-place add{_caller()}"
    return after


def _carried(target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stream | None:
    if name == "mul" and len(args) == 2 and not is_stream(args[0]):
        args = (args[1], args[0])
    if not args or not is_stream(args[0]) or any(is_stream(a) for a in (*args[1:], *kwargs.values())):
        return None
    stream, rest = args[0], args[1:]
    if name in UNCHANGED:
        return stream
    if name in DROPOUTS:
        return _dropped_out(stream, target, rest, kwargs)
    if name in SCALINGS:
        factor = scaling_factor(name, args)
        if factor is None:
            return None
        op = aten.div.Tensor if name.startswith("div") else aten.mul.Tensor
        scaled = stream.map(lambda v: op(v, factor), stream.axis)
        if name.endswith("_"):
            stream.stale = f"by an in-place `{name}`{_caller()}"
        return scaled
    # A first look at one source decides: the shape of the result tells whether the tokens stayed whole.
    first = map_streams(target(stream.blocks[0], *rest, **kwargs), Stream.read)
    if not isinstance(first, torch.Tensor | fx.Proxy):
        return None
    if name in CASTS and example(first).dtype == stream.dtype and example(first).device == stream.device:
        return stream
    axis = carried_axis(name, args, stream.shape, example(first).shape, stream.axis)
    if axis is None:
        return None
    return stream.map(lambda v: target(v, *rest, **kwargs), axis, row_major=name in ROW_MAJOR)


def _dropped_out(stream: Stream, target: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Stream:
    p = rest[0] if rest else kwargs.get("p", 0.5)
    training = rest[1] if len(rest) > 1 else kwargs.get("training", kwargs.get("train", True))
    if p == 0 or not training:
        return stream
    # Dropping a tensor of ones draws the same random numbers as dropping the stream does.
    mask = target(aten.ones_like.default(stream.blocks[0]), *rest, **kwargs)
    return stream.map(lambda v: aten.mul.Tensor(v, mask), stream.axis)


def map_streams(value: Any, function: Callable[[Stream], Any]) -> Any:
    """``value`` with every stream in it replaced; containers without one come back as they are."""
    if is_stream(value):
        return function(value)
    if isinstance(value, list | tuple):
        items = [map_streams(item, function) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        changed = {key: map_streams(item, function) for key, item in value.items()}
        if all(changed[key] is value[key] for key in changed):
            return value
        result = copy.copy(value)
        for key, item in changed.items():
            result[key] = item
        return result
    return value


def _last(value: Value, axis: int) -> Value:
    return value if axis == -1 else aten.movedim.int(value, axis, -1)


def _unbound(value: Value, count: int) -> Iterable[Value]:
    rows = aten.unbind.int(value, 0)
    return [rows[i] for i in range(count)]


def _same_shape(a: Value, b: Value) -> bool:
    return tuple(example(a).shape) == tuple(example(b).shape)


def _broadcasts(value: Value, stream: Stream) -> bool:
    shape, target, axis = getattr(example(value), "shape", None), stream.shape, stream.axis
    if shape is None or len(shape) > len(target) or example(value).dtype.is_complex:
        return False
    # A term that is constant along the features (the mean in a hand-written norm) is no source.
    if len(shape) and (len(shape) < -axis or shape[axis] != target[axis]):
        return False
    return all(n == m or n == 1 for n, m in zip(reversed(shape), reversed(target), strict=False))


def _caller() -> str:
    """Where the user's code did this, as `` at file:line``."""
    if torch.compiler.is_compiling():
        return ""
    frame = sys._getframe(1)
    while frame is not None and ("/torch/" in frame.f_code.co_filename or "/attnres_compile/" in frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"


def _flatten(stream: Stream) -> tuple[list[Any], Any]:
    static = (type(stream), len(stream.blocks), stream.position, stream.axis, stream.plan, stream.reads)
    rows = None if stream.phase is None else (stream.phase.first, len(stream.phase.o))
    phase = [] if stream.phase is None else [*stream.phase.o, *stream.phase.m, *stream.phase.l]
    return [*stream.blocks, stream.partial, *phase], (static, rows)


def _unflatten(values: Iterable[Any], context: Any) -> Stream:
    (kind, count, position, axis, plan, reads), rows = context
    blocks, partial, statistics = _split(list(values), count)
    phase = None
    if rows is not None:
        first, size = rows
        o, m, l = (tuple(statistics[i * size : (i + 1) * size]) for i in range(3))
        phase = Phase(first, o, m, l)
    stream: Stream = kind(blocks, partial, phase, position, axis, plan, reads)
    return stream


def _split(values: list[Any], count: int) -> tuple[tuple[Any, ...], Any, list[Any]]:
    return tuple(values[:count]), values[count], values[count + 1 :]


for _kind in (Stream, TensorStream):
    pytree.register_pytree_node(_kind, _flatten, _unflatten, serialized_type_name=f"attnres_compile.{_kind.__name__}")


def _method(name: str) -> Callable[..., Any]:
    target, operation = getattr(torch.Tensor, name), operation_name(name)

    def method(self: Stream, *args: Any, **kwargs: Any) -> Any:
        return dispatch(target, operation, (self, *args), kwargs)

    return method


def _attribute(name: str) -> property:
    return property(lambda self: getattr(self.read(), name))


KEPT = {*dir(object), *vars(Stream), "__torch_function__", "__torch_dispatch__", "__deepcopy__", "__setstate__"}
KEPT |= {"__cuda_array_interface__", "__dlpack__", "__dlpack_device__", "__getattr__", "__dict__", "__slots__"}
for _name in (set(dir(torch.Tensor)) - KEPT) | {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}:
    _member = _method(_name) if callable(getattr(torch.Tensor, _name, None)) else _attribute(_name)
    setattr(Stream, _name, _member)
Stream.__hash__ = object.__hash__  # type: ignore[method-assign]
