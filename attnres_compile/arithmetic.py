"""Which operations a residual stream carries: the rules that graphs and live values share.

An operation on a stream is one of four things. An *addition* pushes a source. A *carried* operation is linear and
acts on every token alike, so that it maps over the sources and the stream goes on. *Metadata* is answered without
reading. Everything else reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
Target = Callable[..., Any] | str

IN_PLACE = {"iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "ipow": "pow_", "imod": "remainder_"}
SYNONYMS = {"truediv": "div", "true_divide": "div", "divide": "div"}
SYNONYMS |= {"subtract": "sub", "multiply": "mul", "negative": "neg"}

UNCHANGED = frozenset({"clone", "contiguous", "alias", "lift_fresh_copy", "positive", "pos"})
CASTS = frozenset({"to", "_to_copy", "float", "half", "bfloat16", "double", "type_as", "type", "cpu", "cuda"})
ROW_MAJOR = frozenset(
    {"view", "reshape", "flatten", "unflatten", "_unsafe_view", "view_as", "reshape_as", "unsqueeze", "squeeze"}
)
INDEXING = frozenset({"getitem", "slice", "select", "narrow", "index", "index_select", "expand", "expand_as"})
PERMUTATIONS = frozenset({"transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis"})
SCALINGS = frozenset({"mul", "mul_", "rmul", "div", "div_", "neg"})
METADATA = frozenset(
    {"sym_size", "sym_numel", "sym_stride", "size", "dim", "_assert_tensor_metadata", "ndimension", "numel", "nelement"}
    | {"stride", "is_floating_point", "is_complex", "is_contiguous", "element_size", "get_device", "len", "data_ptr"}
    | {"storage_offset", "getattr", "is_same_size", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like"}
    | {"randn_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}
)


# Dynamo calls it as it is: not every one of them traces the name of a method.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def operation_name(target: Target) -> str:
    """One name per operation, whichever front end recorded it: ``aten.add_.Tensor`` and ``iadd`` are ``add_``."""
    if isinstance(target, torch._ops.OpOverload):
        name = str(target._schema.name).rpartition("::")[2]
    else:
        name = target if isinstance(target, str) else str(getattr(target, "__name__", target))
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    name = IN_PLACE.get(name, name)
    return SYNONYMS.get(name, name)


@dataclass(frozen=True)
class Addition:
    """``skip + factor * branch``, the branch being one operand or the product that a fused form adds."""

    skip: Any
    branch: Any
    factor: Any
    product: Callable[..., Any] | None = None
    in_place: bool = False
    commutes: bool = False

    def branch_value(self, call: Callable[..., Any]) -> Any:
        """The pushed value, computed through ``call(target, *args)``."""
        value = self.branch if self.product is None else call(self.product, *self.branch)
        if isinstance(self.factor, int | float) and self.factor == 1:
            return value
        if isinstance(self.factor, int | float) and self.factor == -1 and not isinstance(value, int | float):
            return call(torch.ops.aten.neg.default, value)
        if isinstance(value, int | float):
            return self.factor * value
        return call(torch.ops.aten.mul.Tensor, value, self.factor)


_FUSED = {
    "addcmul": torch.ops.aten.mul.Tensor,
    "addcmul_": torch.ops.aten.mul.Tensor,
    "addcdiv": torch.ops.aten.div.Tensor,
    "addmm": torch.ops.aten.mm.default,
    "addmm_": torch.ops.aten.mm.default,
    "baddbmm": torch.ops.aten.bmm.default,
}


def changed_in_place(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any | None:
    """The argument that an operation changes in place, and with it whatever shares its memory; or None."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    by_name = name == "setitem" or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")
    if not by_name and kwargs.get("inplace") is not True:
        return None
    return args[0] if args else kwargs.get("input", kwargs.get("self"))


def as_addition(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Addition | None:
    """The addition that an operation is, or None. ``skip`` is the first operand; an add commutes."""
    if kwargs.get("out") is not None:
        return None
    if name in ("add", "add_", "radd", "sub", "sub_"):
        operands = [*args, *(kwargs[key] for key in ("input", "other") if key in kwargs)]
        alpha = operands[2] if len(operands) > 2 else kwargs.get("alpha", 1)
        if len(operands) < 2:
            return None
        if name.startswith("sub"):
            return Addition(operands[0], operands[1], -alpha, in_place=name.endswith("_"))
        commutes = isinstance(alpha, int | float) and alpha == 1 and not name.endswith("_")
        return Addition(operands[0], operands[1], alpha, in_place=name.endswith("_"), commutes=commutes)
    if name in _FUSED and len(args) == 3 and kwargs.get("beta", 1) == 1:
        factor = kwargs.get("value", kwargs.get("alpha", 1))
        return Addition(args[0], (args[1], args[2]), factor, _FUSED[name], in_place=name.endswith("_"))
    return None


def carried_axis(name: str, args: Sequence[Any], before: Sequence[Any], after: Sequence[Any], axis: int) -> int | None:
    """Where the feature axis is after an operation that acts on every token alike, or None if it does not.

    Args:
        name: operation name.
        args: its arguments, the stream first.
        before: shape of the stream.
        after: shape of the result.
        axis: the feature axis, counted from the end.
    """
    if name in UNCHANGED or name in CASTS or name in SCALINGS or name in DROPOUTS:
        return axis
    ndim, last = len(before), axis == -1
    if not ndim:
        return None
    same_width = len(after) > 0 and same(after[-1:], before[-1:])
    if name in ROW_MAJOR:
        if reinterprets(name, args):
            return None
        if (last and same_width) or same(before, after):
            return axis
        return None if last else _whole_axis(before, after, axis)
    if name in INDEXING:
        return -1 if last and same_width and _leaves_last_axis(name, args, ndim, before, after) else None
    if name in PERMUTATIONS:
        order = permutation(name, args, ndim)
        return None if order is None else order.index(axis + ndim) - ndim
    return None


def same(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Whether all sizes are equal, as far as is known: a trace must not ask for sizes that data decide."""
    if len(before) != len(after):
        return False
    pairs = zip(before, after, strict=True)
    return all(n == m if isinstance(n, int) and isinstance(m, int) else guard_or_false(n == m) for n, m in pairs)


def reinterprets(name: str, args: Sequence[Any]) -> bool:
    """Whether a view gives the same bits another dtype, in which they stand for other numbers."""
    return name == "view" and any(isinstance(arg, torch.dtype) for arg in args)


def _whole_axis(before: Sequence[Any], after: Sequence[Any], axis: int) -> int | None:
    """Where an axis is after a reshape that neither splits it nor joins it with another: as much comes before it."""
    outer, width = math.prod(before[:axis]), before[axis]
    for i, n in enumerate(after):
        # Asked of symbolic sizes, this adds no guards.
        if statically_known_true(n == width) and statically_known_true(math.prod(after[:i]) == outer):
            return i - len(after)
    return None


# Of these only plain dropout goes on in training: the others drop whole features.
DROPOUTS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}) | {
    "feature_dropout"
}


def _leaves_last_axis(name: str, args: Sequence[Any], ndim: int, before: Sequence[Any], after: Sequence[Any]) -> bool:
    if name in ("slice", "select", "narrow", "index_select"):
        dim = args[1] if len(args) > 1 else 0
        return (isinstance(dim, int) and dim % ndim != ndim - 1) or (name == "slice" and same(before, after))
    if name == "index":
        return len(args[1]) < ndim or args[1][-1] is None
    if name != "getitem":
        return True
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(getattr(i, "dtype", None) == torch.bool for i in index):
        return False
    consumed = [i for i in index if i is not None and i is not Ellipsis]
    if len(consumed) == len([i for i in index if i is not None]) and len(consumed) < ndim:
        return True
    return (len(consumed) < ndim and index[-1] is Ellipsis) or index[-1] == slice(None)


def permutation(name: str, args: Sequence[Any], ndim: int) -> list[int] | None:
    """For each axis of the result the axis that it was, or None where the arguments do not say."""
    order = list(range(ndim))
    if name in ("movedim", "moveaxis"):
        if not all(isinstance(a, int) for a in args[1:3]):
            return None
        order.insert(args[2] % ndim, order.pop(args[1] % ndim))
        return order
    dims = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if not all(isinstance(d, int) for d in dims):
        return None
    if name == "permute":
        return [d % ndim for d in dims]
    if len(dims) != 2:
        return None
    i, j = dims[0] % ndim, dims[1] % ndim
    order[i], order[j] = order[j], order[i]
    return order


def scaling_factor(name: str, args: Sequence[Any], ndim: int) -> Any | None:
    """The single number that a scaling multiplies or divides a stream of ``ndim`` axes by: a scalar, or a tensor of it.

    Args:
        name: operation name.
        args: its arguments, the stream first.
        ndim: axes of the stream; a tensor of one element with more would change its shape.
    """
    if name == "neg":
        return -1
    if len(args) != 2:
        return None
    factor = args[1]
    return factor if isinstance(factor, NUMBERS) or _is_one_element(factor, ndim) else None


def _is_one_element(value: Any, ndim: int) -> bool:
    shape = getattr(value, "shape", None)
    return shape is not None and len(shape) <= ndim and all(isinstance(n, int) and n == 1 for n in shape)
