"""What the operators share: the compute dtype, the key statistics of one source, and their gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

LIBRARY = torch.library.Library("attnres_compile", "DEF")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` outside autocast: a kernel sits below autocast's dispatch key but inherits its state."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return call


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for the half types, the dtype itself for fp32 and fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def key_vector(query: Tensor, key_norm: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``g * w`` in ``dtype``: only this product of key-norm weight and pseudo-query reaches the logits."""
    w = query.to(dtype)
    return w if key_norm is None else w * key_norm.to(dtype)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """``rsqrt(mean(x^2) + eps)`` over the last axis of ``x [..., d]``, without a full-size temporary."""
    return torch.rsqrt(torch.linalg.vector_norm(x, dim=-1).square() / x.shape[-1] + eps)


def source_gradient(x: Tensor, keys: Tensor, r: Tensor, dots: Tensor, grad_logits: Tensor) -> Tensor:
    """Gradient that reaches a source through its logits.

    Args:
        x: the source, ``[..., d]``, compute dtype.
        keys: ``g * w``, ``[S, d]``.
        r: ``inverse_rms(x)``, ``[...]``.
        dots: ``<x, keys_s>``, ``[S, ...]``.
        grad_logits: gradient of the logits ``r * dots``, ``[S, ...]``.

    Returns:
        ``sum_s grad_logits_s (r keys_s - dots_s r^3 x / d)``, ``[..., d]``.
    """
    along_keys = torch.movedim(grad_logits * r, 0, -1) @ keys
    # Not r.pow(3), which underflows in fp32 for sources near 1e18.
    along_x = (grad_logits * r * dots).sum(0) * r * r / x.shape[-1]
    return along_keys - along_x.unsqueeze(-1) * x


def key_gradient(x: Tensor, r: Tensor, grad_logits: Tensor) -> Tensor:
    """Gradient of ``g * w`` from one source: ``sum_tokens grad_logits_s r x``, ``[S, d]``."""
    weights = (grad_logits * r).reshape(grad_logits.shape[0], -1)
    return weights @ x.reshape(-1, x.shape[-1])


def split_key_gradient(grad: Tensor, query: Tensor, key_norm: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of the pseudo-query and of the key-norm weight from that of their product."""
    if key_norm is None:
        return grad.to(query.dtype), None
    return (grad * key_norm).to(query.dtype), (grad * query).to(key_norm.dtype)
