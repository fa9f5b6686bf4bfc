"""The kernels in Triton, for CUDA devices: what ``factored`` computes, each source read once and nothing kept.

Whatever these kernels do not take goes to ``factored``: fp64, tensors of different dtypes, ``d`` above 8192, more than
128 reads at once, tensors of other devices, and everything where Triton cannot be imported.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnres_compile.ops import factored

MOST_FEATURES = 8192
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@cache
def reason() -> str:
    """Why Triton cannot be imported; empty if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        importlib.import_module("triton")
    except Exception as error:
        return f"triton cannot be imported: {error}"
    return ""


def available() -> bool:
    """Whether Triton can be imported."""
    return not reason()


def depth_attention(sources: Sequence[Tensor], key: Tensor, eps: float, scale: float) -> Tensor:
    """See ``factored.depth_attention``."""
    return _set("read", sources, key).depth_attention(sources, key, eps, scale)


def depth_attention_backward(
    grad: Tensor, sources: Sequence[Tensor], key: Tensor, eps: float, scale: float
) -> tuple[list[Tensor], Tensor]:
    """See ``factored.depth_attention_backward``."""
    chosen = _set("read", [*sources, grad], key)
    return chosen.depth_attention_backward(grad, sources, key, eps, scale)


def inter_block(blocks: Sequence[Tensor], keys: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """See ``factored.inter_block``."""
    return _set("phase_one", blocks, keys).inter_block(blocks, keys, eps)


def inter_block_backward(
    grad_o: Tensor, grad_m: Tensor, grad_l: Tensor, blocks: Sequence[Tensor], keys: Tensor, eps: float
) -> tuple[list[Tensor], Tensor]:
    """See ``factored.inter_block_backward``."""
    chosen = _set("phase_one", blocks, keys, grad_o, grad_m, grad_l)
    return chosen.inter_block_backward(grad_o, grad_m, grad_l, blocks, keys, eps)


def merge(o: Tensor, m: Tensor, l: Tensor, partial: Tensor, key: Tensor, eps: float, scale: float) -> Tensor:
    """See ``factored.merge``."""
    return _set("phase_two", [partial], key, o, m, l).merge(o, m, l, partial, key, eps, scale)


def merge_backward(
    grad: Tensor, o: Tensor, m: Tensor, l: Tensor, partial: Tensor, key: Tensor, eps: float, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See ``factored.merge_backward``."""
    chosen = _set("phase_two", [partial, grad], key, o, m, l)
    return chosen.merge_backward(grad, o, m, l, partial, key, eps, scale)


def add_merge_norm(
    partial: Tensor,
    branch: Tensor,
    o: Tensor,
    m: Tensor,
    l: Tensor,
    key: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm_eps: float,
    scale: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """See ``factored.add_merge_norm``."""
    chosen = _set("norm", [partial, branch], key, o, m, l)
    return chosen.add_merge_norm(partial, branch, o, m, l, key, weight, bias, eps, norm_eps, scale, centred)


def add_merge_norm_backward(
    grad_total: Tensor | None,
    grad_normalised: Tensor,
    total: Tensor,
    o: Tensor,
    m: Tensor,
    l: Tensor,
    key: Tensor,
    weight: Tensor | None,
    eps: float,
    norm_eps: float,
    scale: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See ``factored.add_merge_norm_backward``."""
    rows = [total, grad_normalised] if grad_total is None else [total, grad_normalised, grad_total]
    chosen = _set("norm", rows, key, o, m, l)
    return chosen.add_merge_norm_backward(
        grad_total, grad_normalised, total, o, m, l, key, weight, eps, norm_eps, scale, centred
    )


def _set(module: str, rows: Sequence[Tensor], keys: Tensor, *statistics: Tensor) -> Any:
    """The kernels' ``module``, or ``factored`` where they do not take these tensors.

    Args:
        module: name of a module of this package.
        rows: tensors ``[..., d]`` of one dtype.
        keys: ``[d]`` or ``[S, d]``, fp32.
        statistics: what phase 1 hands on, fp32.
    """
    first = rows[0]
    taken = (
        first.dtype in _DTYPES
        and all(x.dtype == first.dtype for x in rows)
        and all(x.dtype == torch.float32 for x in (keys, *statistics))
        and first.shape[-1] <= MOST_FEATURES
        and available()
    )
    if not taken:
        return factored
    launch = importlib.import_module(f"{__name__}.launch")
    on_device = first.device.type == "cuda" or launch.INTERPRETED
    if not on_device or (keys.ndim == 2 and len(keys) > launch.MOST_READS):
        return factored
    return importlib.import_module(f"{__name__}.{module}")
