"""A model and example inputs: how it is called, which of its axes are dynamic, and how it is called at other sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from attnres_compile.capture.inputs import normalise
from attnres_compile.errors import InputError

Shapes: TypeAlias = Mapping[str, Any] | tuple[Any, ...] | list[Any]
Outputs: TypeAlias = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class ExampleCall:
    """One call of ``module`` with inputs that an exporter captures and compares with."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        """All tensor inputs, in the order of an exported program's inputs."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def outputs(self) -> Outputs:
        """Run the module without gradients: the names of its output tensors, and the tensors."""
        with torch.no_grad():
            return named_tensors(self.module(*self.args, **self.kwargs))

    def arguments(self) -> dict[str, Any]:
        """The inputs by the names of ``forward``'s parameters, in their order.

        Raises:
            InputError: ``forward`` cannot be called with these inputs.
        """
        try:
            return inspect.signature(self.module.forward).bind(*self.args, **self.kwargs).arguments
        except TypeError as error:
            raise InputError(f"the model cannot be called with the example inputs: {error}") from error


def example_call(
    model: nn.Module | ExportedProgram, inputs: Any, output: Callable[[Any], Any] | None = None
) -> ExampleCall:
    """Normalise example inputs. A model whose ``forward`` has a parameter ``use_cache`` is called without a cache.

    Args:
        model: what is called.
        inputs: a tensor, a tuple of positional inputs, a mapping of keyword inputs (a BatchEncoding of
            ``transformers`` is one), or None for those of an ExportedProgram, or for some that are made from a Hugging
            Face model's config.
        output: picks what is exported from the model's result.

    Raises:
        InputError: there are no inputs, ``forward`` has other parameters, or ``output`` is given for an
            ExportedProgram.
    """
    if isinstance(model, ExportedProgram):
        if output is not None:
            raise InputError("the outputs of an ExportedProgram are fixed; export the module to choose among them")
        module, recorded = model.module(), model.example_inputs
        args, kwargs = recorded if inputs is None and recorded else normalise(module, inputs)
        return ExampleCall(module, args, _ordered(kwargs, recorded[1] if recorded else ()))
    args, kwargs = normalise(model, inputs)
    selected = model if output is None else _Selected(model, output)
    # torch.export pairs keyword inputs with dynamic shapes by position.
    call = ExampleCall(selected, args, _ordered(kwargs, inspect.signature(model.forward).parameters))
    call.arguments()
    return call


def named_tensors(result: Any, name: str = "") -> Outputs:
    """The tensors of a model's result and their names: ``output``, ``output_0``, or the keys of a mapping.

    Raises:
        InputError: the result holds something that is neither a tensor nor a container of tensors.
    """
    if isinstance(result, Tensor):
        return [(name or "output", result)]
    if isinstance(result, Mapping):
        items = [(str(key), value) for key, value in result.items()]
    elif isinstance(result, tuple | list):
        keys = getattr(result, "_fields", None) or [str(i) if name else f"output_{i}" for i in range(len(result))]
        items = list(zip(keys, result, strict=True))
    elif is_dataclass(result) and not isinstance(result, type):
        items = [(field.name, getattr(result, field.name)) for field in fields(result)]
    elif result is None or isinstance(result, bool | int | float | str):
        return []
    else:
        raise InputError(
            f"the model's result holds a {type(result).__name__}; give `output`, a function that picks its tensors"
        )
    return [pair for key, value in items for pair in named_tensors(value, f"{name}_{key}" if name else key)]


def dynamic_shapes_of(call: ExampleCall, given: Shapes | None) -> dict[str, Any]:
    """Dynamic axes by the names of ``forward``'s parameters, as ``torch.export`` takes them, or by name.

    By default the tensors that share the first one's size of axis 0 share a dynamic axis 0, "batch"; axis 1 of
    integer tensors ``[batch, length]`` is dynamic too, "sequence", a further one for each different length.
    Parameters that ``given`` leaves out are static.
    """
    arguments = call.arguments()
    if isinstance(given, Mapping):
        return dict.fromkeys(arguments) | dict(given)
    if given is not None:
        names = [name for name in arguments if name != "use_cache" or len(given) == len(arguments)]
        return dict.fromkeys(arguments) | dict(zip(names, given, strict=False))
    leading = [t.shape[0] for t in call.tensors() if t.dim()]
    sequences: dict[int, str] = {}

    def axes(leaf: Any) -> dict[int, str] | None:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != leading[0]:
            return None
        if leaf.dim() != 2 or leaf.is_floating_point() or leaf.is_complex():
            return {0: "batch"}
        number = f"_{len(sequences)}" if sequences else ""
        return {0: "batch", 1: sequences.setdefault(leaf.shape[1], f"sequence{number}")}

    return {name: pytree.tree_map(axes, value) for name, value in arguments.items()}


def without_names(shapes: Mapping[str, Any]) -> Any:
    """``shapes`` for ``torch.export``: which values a named axis can take is left to the model."""

    def unnamed(axes: Any) -> Any:
        if isinstance(axes, Mapping):
            return {axis: Dim.DYNAMIC if isinstance(dim, str) else dim for axis, dim in axes.items()}
        return axes and type(axes)(Dim.DYNAMIC if isinstance(dim, str) else dim for dim in axes)

    return pytree.tree_map(unnamed, dict(shapes), is_leaf=is_axes)


def enlarged(call: ExampleCall, shapes: Mapping[str, Any]) -> ExampleCall:
    """The call with every dynamic axis of size 1 at size 2: ``torch.export`` takes a size of 1 for a constant."""
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    specs = pytree.tree_leaves(shapes, is_leaf=is_axes)
    if len(specs) != len(leaves):
        return call

    def at_least_two(leaf: Any, spec: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dynamic = {axis for axis, dim in _axes(spec) if dim not in (None, Dim.STATIC) and not isinstance(dim, int)}
        return _resized(leaf, [2 if i in dynamic and size == 1 else size for i, size in enumerate(leaf.shape)])

    args, kwargs = pytree.tree_unflatten([at_least_two(*pair) for pair in zip(leaves, specs, strict=True)], structure)
    return ExampleCall(call.module, args, kwargs)


def axis_names(program: ExportedProgram, shapes: Mapping[str, Any]) -> dict[str, str]:
    """The names that ``shapes`` gives to the symbols of ``program``'s inputs, through strings or ``Dim`` objects."""
    specs, inputs = pytree.tree_leaves(shapes, is_leaf=is_axes), _input_values(program)
    names = {}
    for value, spec in zip(inputs, specs, strict=True) if len(inputs) == len(specs) else ():
        for axis, dim in _axes(spec):
            name = dim if isinstance(dim, str) else getattr(dim, "__name__", None)
            if name and _is_symbol(value.shape[axis]):
                names[str(value.shape[axis])] = name
    return names


def other_sizes(program: ExportedProgram, call: ExampleCall) -> Iterator[ExampleCall]:
    """The same call with every dynamic axis at another size, in several ways; none for a program without such axes."""
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    values = _input_values(program)
    symbols: dict[Any, int] = {}
    batch: set[Any] = set()
    for value, leaf in zip(values, leaves, strict=True):
        for axis, size in enumerate(getattr(value, "shape", ())):
            if _is_symbol(size):
                symbols[size.node.expr] = leaf.shape[axis]
                batch |= {size.node.expr} if axis == 0 else set()
    choices = {}
    for symbol, size in symbols.items():
        # Lengths shrink first: a longer sequence may not fit the model's table of positions.
        sizes = (size + 1, size - 1, 2 * size) if symbol in batch else (size - 1, size + 1, 2 * size)
        bounds = program.range_constraints.get(symbol)
        fitting = [n for n in sizes if n > 0 and (bounds is None or bounds.lower <= n <= bounds.upper)]
        choices[symbol] = fitting or [size]
    for i in range(max(map(len, choices.values()), default=0)):
        chosen = {symbol: sizes[min(i, len(sizes) - 1)] for symbol, sizes in choices.items()}
        resized = [
            _resized(leaf, [int(n.node.expr.subs(chosen)) if isinstance(n, torch.SymInt) else n for n in value.shape])
            if isinstance(leaf, Tensor)
            else leaf
            for leaf, value in zip(leaves, values, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(resized, structure)
        yield ExampleCall(call.module, args, kwargs)


@contextmanager
def evaluated(module: nn.Module) -> Iterator[None]:
    """The module in eval mode; afterwards every submodule's mode is as before."""
    modes = {child: child.training for child in module.modules()}
    try:
        with suppress(NotImplementedError):  # an exported program's module has one mode only
            module.eval()
        yield
    finally:
        for child, training in modes.items():
            child.training = training


class _Selected(nn.Module):
    """A model of which only a part of the result counts."""

    def __init__(self, model: nn.Module, output: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model

        @wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return output(model(*args, **kwargs))

        self.forward = forward


def _ordered(kwargs: Mapping[str, Any], order: Iterable[str]) -> dict[str, Any]:
    return {name: kwargs[name] for name in order if name in kwargs} | dict(kwargs)


def is_axes(spec: Any) -> bool:
    """Whether a part of dynamic shapes describes the axes of one tensor."""
    if isinstance(spec, Mapping):
        return all(isinstance(key, int) for key in spec)
    return isinstance(spec, tuple | list) and not any(isinstance(dim, Mapping | tuple | list) for dim in spec)


def _axes(spec: Any) -> Iterable[tuple[int, Any]]:
    return spec.items() if isinstance(spec, Mapping) else enumerate(spec or ())


def _input_values(program: ExportedProgram) -> list[Any]:
    """Fake tensors of the program's inputs, and its constant inputs, as ``pytree`` orders them."""
    nodes = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    return [nodes.get(name) if isinstance(name, str) else name for name in program.graph_signature.user_inputs]


def _is_symbol(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_Symbol)


def _resized(leaf: Tensor, sizes: Iterable[int]) -> Tensor:
    """Cut, or fill up with repetitions; further rows are shifted, so that rows differ but values stay valid."""
    old = leaf.shape[0] if leaf.dim() else 0
    for axis, size in enumerate(sizes):
        if size != leaf.shape[axis]:
            leaf = leaf.index_select(axis, torch.arange(size, device=leaf.device) % leaf.shape[axis])
    if leaf.dim() < 2 or len(leaf) <= old:
        return leaf
    return torch.stack([row.roll(i, 0) if i >= old else row for i, row in enumerate(leaf)])
