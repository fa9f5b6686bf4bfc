"""The C functions and structures of `arguments.h` and `kernels.cpp`, as ctypes sees them."""

from __future__ import annotations

import ctypes
from typing import Any, Final

INT32, INT64, DOUBLE, ADDRESS = ctypes.c_int32, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class ReadArguments(ctypes.Structure):
    """n sources and the S keys that read them."""

    _fields_ = (
        ("threads", INT64),
        ("n", INT64),
        ("reads", INT64),
        ("tokens", INT64),
        ("d", INT64),
        ("eps", DOUBLE),
        ("scale", DOUBLE),
        ("sources", ADDRESS),
        ("strides", ADDRESS),
        ("keys", ADDRESS),
    )


class MergeArguments(ctypes.Structure):
    """One read's statistics, the partial sum and the key."""

    _fields_ = (
        ("threads", INT64),
        ("tokens", INT64),
        ("d", INT64),
        ("eps", DOUBLE),
        ("scale", DOUBLE),
        ("o", ADDRESS),
        ("o_stride", INT64),
        ("m", ADDRESS),
        ("l", ADDRESS),
        ("partial", ADDRESS),
        ("partial_stride", INT64),
        ("key", ADDRESS),
    )


class NormArguments(ctypes.Structure):
    """A norm after a merge; null for an absent weight or bias."""

    _fields_ = (("weight", ADDRESS), ("bias", ADDRESS), ("eps", DOUBLE), ("centred", INT32))


_READ, _MERGE, _NORM = (ctypes.POINTER(s) for s in (ReadArguments, MergeArguments, NormArguments))
_ROWS: Final = (ADDRESS, INT64)
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "attnres_depth_attention": (_READ, ADDRESS),
    "attnres_depth_attention_backward": (_READ, *[ADDRESS] * 3),
    "attnres_inter_block": (_READ, *[ADDRESS] * 3),
    "attnres_inter_block_backward": (_READ, *[ADDRESS] * 5),
    "attnres_merge": (_MERGE, ADDRESS),
    "attnres_first_merge": (_MERGE, ADDRESS),
    "attnres_merge_backward": (_MERGE, *_ROWS, *[ADDRESS] * 5),
    "attnres_merge_norm": (_MERGE, _NORM, ADDRESS),
    "attnres_add_merge_norm": (_MERGE, _NORM, *_ROWS, *[ADDRESS] * 2),
    "attnres_add_merge_norm_backward": (_MERGE, _NORM, *_ROWS, *_ROWS, *[ADDRESS] * 5),
}


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, its functions with their argument types; a structure is passed by its address."""
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library
