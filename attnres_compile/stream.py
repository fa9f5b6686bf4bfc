"""The residual stream as a value: an add pushes a source, everything else reads the depth-attention mix.

The same arithmetic serves live tensors and, with ``torch.fx.Proxy`` sources, the rewriting of graphs.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from attnres_compile.arithmetic import NUMBERS, same
from attnres_compile.chains import BlockPlan
from attnres_compile.errors import RefusedError
from attnres_compile.observer import Observer
from attnres_compile.reads import ReadParameters

aten = torch.ops.aten
ops = torch.ops.attnres_compile

Value = Any  # a tensor, or a proxy for one


class Phase(NamedTuple):
    """Phase-1 statistics of the finished blocks, for the reads from row ``first``."""

    first: int
    o: tuple[Value, ...]
    m: tuple[Value, ...]
    l: tuple[Value, ...]

    def of(self, row: int) -> tuple[Value, Value, Value]:
        """The statistics for the read with this row."""
        return self.o[row - self.first], self.m[row - self.first], self.l[row - self.first]


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
        changes: where the memory that this state has in the user's program was changed in place; views share the list.
        seen: how many of these changes the state has.
        folded_from: the finished blocks and their statistics before a reshape that folded the tokens.
    """

    blocks: tuple[Value, ...]
    partial: Value | None
    phase: Phase | None
    position: int
    axis: int
    plan: BlockPlan
    reads: ReadParameters
    changes: list[str] = field(default_factory=list)
    seen: int = 0
    folded_from: tuple[tuple[Value, ...], Phase | None] | None = None

    @property
    def sources(self) -> tuple[Value, ...]:
        """The finished blocks, and the partial sum if there is one."""
        blocks = self.current().blocks
        return blocks if self.partial is None else (*blocks, self.partial)

    def _with(self, blocks: tuple[Value, ...], partial: Value | None, phase: Phase | None, **changed: Any) -> Stream:
        position, axis = changed.get("position", self.position), changed.get("axis", self.axis)
        folded_from = changed.get("folded_from", self.folded_from if _starts_with(blocks, self.blocks) else None)
        return type(self)(blocks, partial, phase, position, axis, self.plan, self.reads, folded_from=folded_from)

    def current(self) -> Stream:
        """This state, unless it was changed in place since.

        Raises:
            RefusedError: the old value, or another view of the same memory, is used afterwards.
        """
        if len(self.changes) > self.seen:
            raise RefusedError(
                f"the residual stream was changed in place ({self.changes[self.seen]}) and the old value is used "
                "afterwards; rebind the result (`x = x + f(x)`) and keep no second name for the stream"
            )
        return self

    def sharing(self, other: Stream) -> Stream:
        """This state, whose memory in the user's program is that of ``other``."""
        self.changes, self.seen = other.changes, len(other.changes)
        return self

    def push(self, branch: Value) -> Stream:
        """The state after adding ``branch``, a tensor that broadcasts to the stream's shape, or a number."""
        refuse_reentrant(getattr(self.reads, "training", False))
        position, partial, blocks = self.position + 1, self.partial, self.current().blocks
        ours = theirs = common = self.dtype
        if not isinstance(branch, NUMBERS):
            theirs = example(branch).dtype
            # A tensor of no axes is a number to PyTorch's type promotion.
            promotes = theirs != ours and example(branch).ndim > 0
            common = torch.promote_types(ours, theirs) if promotes else ours
        if partial is not None:
            partial = aten.add.Tensor(partial, branch)
        elif isinstance(branch, NUMBERS):
            partial = aten.full_like.default(blocks[0], branch)
        else:
            partial = branch if same(example(branch).shape, self.shape) else aten.expand_as.default(branch, blocks[0])
        if example(partial).dtype != common:
            partial = aten.to.dtype(partial, common)
        if ours != common:
            blocks = tuple(aten.to.dtype(block, common) for block in blocks)
        if Observer.active is not None:
            Observer.active.pushed(self.plan, position, branch, theirs, partial)
        phase = self.phase if blocks is self.blocks else None
        after = self._with(blocks, partial, phase, position=position)
        return after._closed() if position <= self.plan.last and self.plan.closes[position] else after

    def at(self, position: int) -> Stream:
        """The same state where the plan has it at ``position``: rows do not shift when layers are skipped."""
        if position == self.current().position:
            return self
        moved = self._with(self.blocks, self.partial, self.phase, position=position)
        crossed = any(self.plan.closes[self.position + 1 : position + 1])
        return (moved._closed() if crossed else moved).sharing(self)

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
            Observer.active.reads(self, row)
        scale, eps = float(len(sources)) if self.plan.preserve else 1.0, self.plan.eps
        phase = self.phase
        if phase is None or not phase.first <= row < phase.first + len(phase.o):
            values = [_last(v, self.axis) for v in sources]
            h = ops.depth_attention.default(values, *self._parameters(row), eps, scale)
        else:
            partial = None if self.partial is None else _last(self.partial, self.axis)
            again = self._kept()
            parameters = (None, None) if partial is None and not again else self._parameters(row)
            h = ops.merge.default(*phase.of(row), partial, *parameters, eps, scale, *again)
            h = h if example(h).dtype == self.dtype else aten.to.dtype(h, self.dtype)
        return _given(h if self.axis == -1 else self._features_moved(h))

    def _features_moved(self, h: Value) -> Value:
        """A mix ``[..., d]`` with its features where the stream has them, stored as the sum is: a view may follow."""
        h = aten.movedim.int(h, -1, self.axis)
        return aten.contiguous.default(h) if example(self.blocks[0]).is_contiguous() else h

    def _kept(self) -> tuple[list[Value], ...]:
        """What a merge keeps for its backward instead of its row of phase 1; compilers decide that themselves."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not isinstance(self.blocks[0], torch.Tensor):
            return ()
        return ([_last(block, self.axis) for block in self.blocks],)

    def _parameters(self, row: int) -> tuple[Value, Value | None]:
        query, key_norm = self.reads.query, self.reads.key_norm
        return aten.select.int(query, 0, row), None if key_norm is None else aten.select.int(key_norm, 0, row)

    def copied(self) -> Stream:
        """Another value: an in-place add on it leaves this one as it is, and so does one on its lone source."""
        blocks = (aten.clone.default(self.blocks[0]),) if len(self.current().sources) == 1 else self.blocks
        return self._with(blocks, self.partial, self.phase)

    def stored_as(self, first: Value) -> Stream:
        """This state with ``first`` for its source, which it equals: the sum is stored as the source is."""
        if same(example(first).stride(), example(self.blocks[0]).stride()):
            return self
        return self._with((first, *self.blocks[1:]), self.partial, self.phase).sharing(self)

    def total(self) -> Value:
        """The standard residual stream: the sum of all sources."""
        total, *others = self.sources
        for other in others:
            total = aten.add.Tensor(total, other)
        return _given(total)

    def map(self, function: Callable[[Value], Value], axis: int, *, row_major: bool = False) -> Stream:
        """The stream whose sources went through ``function``, which is linear and acts on every token alike."""
        blocks = tuple(function(block) for block in self.blocks)
        partial = None if self.partial is None else function(self.partial)
        phase = _reshaped(self.phase, blocks[0]) if row_major and axis == -1 else None
        folded_from = (self.blocks, self.phase) if row_major and axis == self.axis else None
        return self._with(blocks, partial, phase, axis=axis, folded_from=folded_from)

    def restored(self, shape: Sequence[Any], function: Callable[[Value], Value]) -> Stream | None:
        """Undo a reshape: where it leads back to ``shape``, the blocks that were there before it are as they were."""
        if self.folded_from is None or not same(shape, example(self.folded_from[0][0]).shape):
            return None
        old, phase = self.folded_from
        blocks = old + tuple(function(block) for block in self.blocks[len(old) :])
        partial = None if self.partial is None else function(self.partial)
        if len(blocks) > len(old):
            phase = _reshaped(self.phase, blocks[0]) if self.axis == -1 else None
        return self._with(blocks, partial, phase, folded_from=None)

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
        return len(self.shape)

    @property
    def requires_grad(self) -> bool:
        """Whether any source does."""
        return any(source.requires_grad for source in self.sources)


class TensorStream(Stream, torch.Tensor):  # type: ignore[misc, override]
    """A stream for which ``isinstance(stream, torch.Tensor)`` holds, as user code between layers may ask.

    The tensor underneath is empty and never computed with. Tracers take the plain ``Stream``: they would want a
    proxy for that tensor.
    """

    def __new__(cls, *_: Any, **__: Any) -> TensorStream:
        """Make the empty tensor; the fields are set by ``Stream``."""
        return torch.Tensor._make_subclass(cls, torch.empty(0))

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """False: FSDP passes every tensor that requires grad through autograd, and walks the fields of the others."""
        return False


def start(value: Value, axis: int, plan: BlockPlan, reads: ReadParameters, *, traced: bool = False) -> Stream:
    """The stream at its source: ``value`` is ``b_0``; ``traced`` says that a tracer will see it."""
    kind = Stream if traced or torch.compiler.is_compiling() else TensorStream
    if Observer.active is not None:
        Observer.active.hold(value)
    return kind((value,), None, None, 0, axis, plan, reads)


def is_stream(value: object) -> bool:
    """Whether a value is a stream."""
    return isinstance(value, Stream)


def refuse_reentrant(training: bool) -> None:
    """Reentrant checkpointing runs layers without recording them, which loses the gradients of a stream.

    Raises:
        RefusedError: it is on the call stack.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not training:
        return
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_function = code.co_name == "forward" and code.co_varnames[:1] == ("ctx",)
        if is_function and code.co_filename.endswith("torch/utils/checkpoint.py"):
            raise RefusedError(
                "reentrant checkpointing loses the gradients of the residual stream; use "
                "`torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` (Hugging Face: "
                "`gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})`)"
            )
        frame = frame.f_back


def map_streams(value: Any, function: Callable[[Stream], Any]) -> Any:
    """``value`` with every stream in it replaced; containers without one come back as they are."""
    return replace_leaves(value, is_stream, function)


def replace_leaves(value: Any, wanted: Callable[[Any], bool], function: Callable[[Any], Any]) -> Any:
    """``value`` with the wanted leaves of its tuples, lists and dicts replaced; others come back as they are."""
    if isinstance(value, (list, tuple)):
        if not _holds(value, wanted):
            return value
        items = [replace_leaves(item, wanted, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        if not _holds(value.values(), wanted):
            return value
        replaced = {key: replace_leaves(item, wanted, function) for key, item in value.items()}
        if type(value) is dict:
            return replaced
        # A dict of another class keeps that class. Not every Dynamo traces copy.copy.
        if hasattr(value, "__dataclass_fields__"):
            return type(value)(**replaced)
        result = copy.copy(value)
        for key, item in replaced.items():
            result[key] = item
        return result
    return function(value) if wanted(value) else value


def _holds(values: Iterable[Any], wanted: Callable[[Any], bool]) -> bool:
    for value in values:
        if isinstance(value, (list, tuple)):
            if _holds(value, wanted):
                return True
        elif isinstance(value, dict):
            if _holds(value.values(), wanted):
                return True
        elif wanted(value):
            return True
    return False


def _given(value: Value) -> Value:
    if Observer.active is not None:
        Observer.active.given(value)
    return value


def _starts_with(values: tuple[Value, ...], first: tuple[Value, ...]) -> bool:
    return all(a is b for a, b in zip(values, first, strict=False))


def _reshaped(phase: Phase | None, like: Value) -> Phase | None:
    """The statistics of tokens that were reshaped to those of ``like [..., d]``."""
    if phase is None:
        return None
    token = aten.select.int(like, -1, 0)
    o = tuple(aten.reshape_as.default(row, like) for row in phase.o)
    m, l = (tuple(aten.reshape_as.default(row, token) for row in rows) for rows in (phase.m, phase.l))
    return Phase(phase.first, o, m, l)


def _last(value: Value, axis: int) -> Value:
    return value if axis == -1 else aten.movedim.int(value, axis, -1)


def _unbound(value: Value, count: int) -> Iterable[Value]:
    rows = aten.unbind.int(value)
    return [rows[i] for i in range(count)]


def flatten(stream: Stream) -> tuple[list[Any], Any]:
    """A stream's tensors, and what else it takes to make it again."""
    static = (type(stream), len(stream.blocks), stream.position, stream.axis, stream.plan, stream.reads)
    rows = None if stream.phase is None else (stream.phase.first, len(stream.phase.o))
    phase = [] if stream.phase is None else [*stream.phase.o, *stream.phase.m, *stream.phase.l]
    return [*stream.blocks, stream.partial, *phase], (static, rows)


def unflatten(values: Iterable[Any], context: Any) -> Stream:
    """The stream that ``flatten`` took apart, with these tensors."""
    (kind, count, position, axis, plan, reads), rows = context
    values, phase = list(values), None
    blocks, partial, statistics = tuple(values[:count]), values[count], values[count + 1 :]
    if rows is not None:
        first, size = rows
        o, m, l = (tuple(statistics[i * size : (i + 1) * size]) for i in range(3))
        phase = Phase(first, o, m, l)
    stream: Stream = kind(blocks, partial, phase, position, axis, plan, reads)
    return stream


for _kind in (Stream, TensorStream):
    pytree.register_pytree_node(_kind, flatten, unflatten, serialized_type_name=f"attnres_compile.{_kind.__name__}")
