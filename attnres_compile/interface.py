"""The tensor interface of a stream: what each operation on it does, and the methods that lead there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from attnres_compile.arithmetic import (
    CASTS,
    DROPOUTS,
    INDEXING,
    METADATA,
    NUMBERS,
    PERMUTATIONS,
    ROW_MAJOR,
    SCALINGS,
    UNCHANGED,
    Addition,
    as_addition,
    carried_axis,
    changed_in_place,
    operation_name,
    reinterprets,
    same,
    scaling_factor,
)
from attnres_compile.errors import RefusedError
from attnres_compile.observer import Observer, caller
from attnres_compile.stream import (
    Stream,
    TensorStream,
    Value,
    example,
    flatten,
    is_stream,
    map_streams,
    unflatten,
)

aten = torch.ops.aten

METADATA_ATTRIBUTES = frozenset(
    {"is_cuda", "is_cpu", "is_meta", "is_xpu", "is_mps", "is_sparse", "is_quantized", "is_nested", "layout", "itemsize"}
    | {"names", "is_leaf", "is_mkldnn", "is_sparse_csr", "is_vulkan", "is_xla", "is_ipu", "is_maia", "is_mtia"}
)


def dispatch(target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an operation to arguments among which there is a stream."""
    for value in (*args, *kwargs.values()):
        if is_stream(value):
            value.current()
    if is_stream(kwargs.get("out")):
        raise RefusedError(f"`{name}` writes into the residual stream by `out=`{caller()}; bind its result instead")
    if not args and "input" in kwargs:
        kwargs = dict(kwargs)
        args = tuple(kwargs.pop(key) for key in ("input", "other") if key in kwargs)
    result = _applied(target, name, args, kwargs)
    changed: Any = changed_in_place(name, args, kwargs)
    if changed is None or result is changed or not (is_stream(changed) or is_stream(result)):
        return result
    where = f"by an in-place `{name}`{caller()}"
    if is_stream(changed):
        changed.changes.append(where)
        if is_stream(result):
            result.sharing(changed)
    if Observer.active is not None:
        Observer.active.in_place.append(where)
    return result


def _applied(target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
    if name == "requires_grad_" and is_stream(args[0]):
        for source in args[0].sources:
            source.requires_grad_(*args[1:], **kwargs)
        return args[0]
    # What an activation with `inplace=True` changes is the read, which it returns.
    if is_stream(changed_in_place(name, args, kwargs)) and not kwargs.get("inplace"):
        raise RefusedError(f"`{name}` changes the residual stream in place{caller()}; write it out of place")
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
    if addition.in_place and not isinstance(value, NUMBERS) and example(value).dtype != skip.dtype:
        value = aten.to.dtype(value, skip.dtype)
    return skip.push(value)


def _carried(target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stream | None:
    if name == "mul" and len(args) == 2 and not is_stream(args[0]):
        args = (args[1], args[0])
    if not args or not is_stream(args[0]) or any(is_stream(a) for a in (*args[1:], *kwargs.values())):
        return None
    stream, rest = args[0], args[1:]
    if name in UNCHANGED:
        state = stream.copied() if name == "clone" else stream
        stored = stream.axis != -1 and (name == "contiguous" or kwargs)
        return state.stored_as(target(state.blocks[0], *rest, **kwargs)) if stored else state
    if name in DROPOUTS:
        return _dropped_out(stream, target, name, rest, kwargs)
    if name in SCALINGS:
        if scaling_factor(name, [stream, *map(example, rest)], stream.ndim) is None:
            return None
        factor = rest[0] if rest else -1
        op = aten.div.Tensor if name.startswith("div") else aten.mul.Tensor
        return stream.map(lambda v: op(v, factor), stream.axis)
    if name not in CASTS | ROW_MAJOR | INDEXING | PERMUTATIONS or reinterprets(name, (*rest, *kwargs.values())):
        return None
    function = _on_any_strides(name, rest, kwargs) or (lambda v: target(v, *rest, **kwargs))
    if name in ROW_MAJOR:
        restored = stream.restored([example(size) for size in _sizes(rest, kwargs)], function)
        if restored is not None:
            return restored.sharing(stream)
    # A first look at one source decides: the shape of the result tells whether the tokens stayed whole.
    first = map_streams(function(stream.blocks[0]), Stream.read)
    if not isinstance(first, torch.Tensor | fx.Proxy):
        return None
    if name in CASTS and example(first).dtype == stream.dtype and example(first).device == stream.device:
        return stream if stream.axis == -1 else stream.stored_as(first)
    axis = carried_axis(name, args, stream.shape, example(first).shape, stream.axis)
    if axis is None:
        return None
    carried = stream.map(function, axis, row_major=name in ROW_MAJOR)
    # Others are views, or may be: an index can copy.
    return carried if name in CASTS else carried.sharing(stream)


def _on_any_strides(name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Value], Value] | None:
    """A view as a reshape: the sources may be stored otherwise than their sum, which the model knows how to view."""
    if name == "view_as":
        return lambda v: aten.reshape_as.default(v, *rest, **kwargs)
    if name not in ("view", "_unsafe_view"):
        return None
    sizes = list(_sizes(rest, kwargs))
    return lambda v: aten.reshape.default(v, sizes)


def _sizes(rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
    return rest[0] if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest or kwargs.get("size", ())


def _dropped_out(
    stream: Stream, target: Any, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> Stream | None:
    p = rest[0] if rest else kwargs.get("p", 0.5)
    training = rest[1] if len(rest) > 1 else kwargs.get("training", kwargs.get("train", True))
    if p == 0 or not training:
        return stream
    if name != "dropout":
        return None
    # Dropping a tensor of ones draws the same random numbers as dropping the stream does.
    mask = target(aten.ones_like.default(stream.blocks[0]), *rest, **kwargs)
    return stream.map(lambda v: aten.mul.Tensor(v, mask), stream.axis)


def _broadcasts(value: Value, stream: Stream) -> bool:
    shape, target, axis = getattr(example(value), "shape", None), stream.shape, stream.axis
    if shape is None or len(shape) > len(target) or example(value).dtype.is_complex:
        return False
    # A term that is constant along the features (the mean in a hand-written norm) is no source.
    if len(shape) and (len(shape) < -axis or not same([shape[axis]], [target[axis]])):
        return False
    return all(same([n], [m]) or same([n], [1]) for n, m in zip(reversed(shape), reversed(target), strict=False))


def _torch_function(
    cls: type[Stream],
    target: Callable[..., Any],
    types: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    if target is checkpoint or isinstance(target, torch._ops.HigherOrderOperator):
        return _carried_through(target, tuple(args), dict(kwargs or {}))
    return dispatch(target, operation_name(target), tuple(args), dict(kwargs or {}))


def _carried_through(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator that calls a function, which is its first argument: streams go in as their tensors."""
    function, *rest = args
    flat: list[Any] = []
    rebuilds: list[tuple[int, Any]] = []
    for value in rest:
        values, context = flatten(value) if is_stream(value) else ([value], None)
        rebuilds.append((len(values), context))
        flat.extend(values)

    def rebuilt(*given: Any, **named: Any) -> Any:
        values, start = [], 0
        for count, context in rebuilds:
            part = given[start : start + count]
            values.append(part[0] if context is None else unflatten(part, context))
            start += count
        return function(*values, **named)

    return target(rebuilt, *flat, **kwargs)


def _method(name: str) -> Callable[..., Any]:
    target, operation = getattr(torch.Tensor, name), operation_name(name)

    def method(self: Stream, *args: Any, **kwargs: Any) -> Any:
        return dispatch(target, operation, (self, *args), kwargs)

    return method


def _rows(self: Stream) -> Iterator[Any]:
    """Row by row: asking an iterator for its first row, as libraries do, must not fix the number of rows in a trace."""
    value, row = self.read(), 0
    while row < value.shape[0]:
        yield value[row]
        row += 1


def _attribute(name: str) -> property:
    if name in METADATA_ATTRIBUTES:
        return property(lambda self: getattr(self.blocks[0], name))
    return property(lambda self: getattr(self.read(), name))


KEPT = {*dir(object), *vars(Stream), "__torch_function__", "__torch_dispatch__", "__deepcopy__", "__setstate__"}
KEPT |= {"__cuda_array_interface__", "__dlpack__", "__dlpack_device__", "__getattr__", "__dict__", "__slots__"}
for _name in (set(dir(torch.Tensor)) - KEPT) | {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}:
    _member = _method(_name) if callable(getattr(torch.Tensor, _name, None)) else _attribute(_name)
    setattr(Stream, _name, _member)
Stream.__hash__ = object.__hash__  # type: ignore[method-assign]
Stream.__iter__ = _rows  # type: ignore[attr-defined]
for _kind in (Stream, TensorStream):
    # On both: torch.Tensor has one of its own, which a subclass would inherit before Stream's is set.
    setattr(_kind, "__torch_function__", classmethod(_torch_function))  # noqa: B010 - a method, to the type checker
