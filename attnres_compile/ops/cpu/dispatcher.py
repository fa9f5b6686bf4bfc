"""Puts the kernels into PyTorch's dispatcher, where a call needs no Python: below the operators' autograd, on the CPU.

Without it (PyTorch's headers are not there, say) the same kernels are called by ctypes, at some 0.1 ms more a call.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

import torch

# The order of `kStorage` and of the fields of `Kernels` in dispatcher.cpp.
STORAGE: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FUNCTIONS: Final = (
    "depth_attention",
    "depth_attention_backward",
    "inter_block",
    "inter_block_backward",
    "merge",
    "first_merge",
    "merge_backward",
    "merge_norm",
    "add_merge_norm",
    "add_merge_norm_backward",
)
SOURCE: Final = Path(__file__).with_name("dispatcher.cpp")
# Once in a process: loading it registers its functions.
loaded: ctypes.CDLL | None = None


def options() -> tuple[list[str], list[str]]:
    """How to compile and how to link it."""
    package = Path(torch.__file__).parent
    return [f"-I{package / 'include'}"], [f"-L{package / 'lib'}", "-ltorch_cpu", f"-Wl,-rpath,{package / 'lib'}"]


def install(dtype: torch.dtype, kernels: ctypes.CDLL | None) -> None:
    """Let the loaded dispatcher call the kernels of a storage type, or no longer."""
    assert loaded is not None
    table = None
    if kernels is not None:
        found = [ctypes.cast(getattr(kernels, f"attnres_{name}"), ctypes.c_void_p) for name in FUNCTIONS]
        table = (ctypes.c_void_p * len(found))(*[function.value for function in found])
    loaded.attnres_install(ctypes.c_int64(STORAGE.index(dtype)), table)
