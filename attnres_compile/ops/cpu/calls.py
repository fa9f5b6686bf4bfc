"""From tensors to the arguments of the C functions in `kernels.cpp`."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from attnres_compile.ops import factored
from attnres_compile.ops.cpu import build
from attnres_compile.ops.cpu.abi import ADDRESS, INT64, MergeArguments, NormArguments, ReadArguments

_PLAIN: Final = (Tensor, torch.nn.Parameter)
# OpenMP's threads do not survive a fork; a child that asked for them would wait for ever.
_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def library_for(
    rows: Sequence[Tensor], key: Tensor, statistics: Sequence[tuple[Tensor, Sequence[int]]] = ()
) -> ctypes.CDLL | None:
    """The library if it takes these tensors, None if the caller has to use `factored`.

    Args:
        rows: tensors of features, to be of one dtype and one shape.
        key: ``[d]`` or ``[S, d]``, to be of the compute dtype.
        statistics: tensors to be of the compute dtype, and the shape that each has to have.
    """
    first = rows[0]
    dtype, shape, computed = first.dtype, first.shape, key.dtype
    if dtype not in build.STORAGE_TYPES or computed != factored.compute_dtype(dtype) or not shape or shape[-1] == 0:
        return None
    if not all(x.dtype == dtype and x.shape == shape and _is_plain(x) for x in rows):
        return None
    if not _is_plain(key) or key.shape[-1] != shape[-1] or 0 in key.shape:
        return None
    if not all(x.dtype == computed and x.shape == wanted and _is_plain(x) for x, wanted in statistics):
        return None
    return build.load(dtype)


def library_for_merge(
    rows: Sequence[Tensor], o: Tensor, m: Tensor, l: Tensor, key: Tensor, *vectors: Tensor | None
) -> ctypes.CDLL | None:
    """`library_for` one read's statistics, and a norm's weight and bias ``[d]`` of any dtype."""
    shape = rows[0].shape
    if key.dim() != 1 or not all(x is None or (x.shape == key.shape and _is_plain(x)) for x in vectors):
        return None
    return library_for(rows, key, [(o, shape), (m, shape[:-1]), (l, shape[:-1])])


class Rows:
    """The rows of a tensor ``[..., d]`` at one distance from each other: of the tensor itself, or else of a copy."""

    def __init__(self, x: Tensor) -> None:
        stride = _row_stride(x)
        if stride is None:
            x, stride = x.contiguous(), x.shape[-1]
        # The address is valid for as long as the tensor lives.
        self.tensor = x
        self.address, self.stride = x.data_ptr(), stride


class Read:
    """Arguments of the functions that read n sources."""

    def __init__(self, sources: Sequence[Tensor], keys: Tensor, eps: float, scale: float) -> None:
        first, n = sources[0], len(sources)
        self.sources = [Rows(x) for x in sources]
        self.keys = keys.contiguous()
        self.addresses = (ADDRESS * n)(*[rows.address for rows in self.sources])
        self.strides = (INT64 * n)(*[rows.stride for rows in self.sources])
        d = first.shape[-1]
        self.arguments = ReadArguments(
            _threads(),
            n,
            keys.numel() // d,
            first.numel() // d,
            d,
            eps,
            scale,
            ctypes.addressof(self.addresses),
            ctypes.addressof(self.strides),
            self.keys.data_ptr(),
        )
        self._first = first

    def empty_gradients(self) -> list[Tensor]:
        """One contiguous tensor per source."""
        return [self._first.new_empty(self._first.shape) for _ in self.sources]


class Merge:
    """Arguments of the functions that merge a read's statistics with the partial sum."""

    def __init__(self, o: Tensor, m: Tensor, l: Tensor, partial: Tensor, key: Tensor, eps: float, scale: float) -> None:
        self.o, self.partial = Rows(o), Rows(partial)
        self.kept = (m.contiguous(), l.contiguous(), key.contiguous())
        m, l, key = self.kept
        d = partial.shape[-1]
        self.arguments = MergeArguments(
            _threads(),
            partial.numel() // d,
            d,
            eps,
            scale,
            self.o.address,
            self.o.stride,
            m.data_ptr(),
            l.data_ptr(),
            self.partial.address,
            self.partial.stride,
            key.data_ptr(),
        )

    def empty_gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Contiguous tensors for the gradients of ``o``, ``m``, ``l`` and ``partial``."""
        x, (m, l, _) = self.partial.tensor, self.kept
        return m.new_empty(x.shape), torch.empty_like(m), torch.empty_like(l), x.new_empty(x.shape)


class Norm:
    """Arguments that describe the norm after a merge."""

    def __init__(
        self, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype
    ) -> None:
        self.vectors = [None if x is None else x.to(dtype).contiguous() for x in (weight, bias)]
        addresses = [None if x is None else x.data_ptr() for x in self.vectors]
        self.arguments = NormArguments(*addresses, eps, centred)


def addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """An array of the addresses of tensors, which have to outlive its use."""
    return (ADDRESS * len(tensors))(*[x.data_ptr() for x in tensors])


def _is_plain(x: Tensor) -> bool:
    """Whether the numbers of ``x`` lie where its address and strides say."""
    return type(x) in _PLAIN and x.is_cpu and x.layout is torch.strided and not x.is_neg() and not x._is_zerotensor()


def _row_stride(x: Tensor) -> int | None:
    """Elements from one row of features to the next, None if that is not one number or features are not adjacent."""
    *leading, d = x.shape
    if x.is_contiguous():
        return d
    *strides, of_features = x.stride()
    if of_features != 1 and d > 1:
        return None
    axes = [(size, stride) for size, stride in zip(leading, strides, strict=True) if size != 1]
    for (_, outer), (size, inner) in itertools.pairwise(axes):
        if outer != size * inner:
            return None
    return axes[-1][1] if axes else d


def _threads() -> int:
    return 1 if _forked else torch.get_num_threads()
