"""The parameters of depth attention: one pseudo-query, and one key-norm weight, per read."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class ReadParameters(Protocol):
    """What a stream needs of its reads; in a graph the tensors are proxies."""

    @property
    def query(self) -> Tensor:
        """Pseudo-queries ``[L, d]``."""

    @property
    def key_norm(self) -> Tensor | None:
        """Key-norm weights ``[L, d]``, or None."""


class ChainReads(nn.ModuleList):
    """The reads of every chain, by index. Called, it passes its input on: a model may call all of its children."""

    def forward(self, x: Any) -> Any:
        """Return ``x``."""
        return x


class DepthReads(nn.Module):
    """Parameters of one chain's reads, a row per read of more than one source.

    Attributes:
        query: pseudo-queries ``[L, d]``, zero at first: every read is then the (scaled) mean of its sources.
        key_norm: weights of the keys' RMSNorm ``[L, d]``, ones at first; None without key norm.
    """

    key_norm: Tensor | None

    def __init__(
        self,
        reads: int,
        width: int,
        *,
        key_norm: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the parameters of ``reads`` reads of sources with ``width`` features."""
        super().__init__()
        self.query = nn.Parameter(torch.zeros(reads, width, device=device, dtype=dtype))
        ones = nn.Parameter(torch.ones(reads, width, device=device, dtype=dtype)) if key_norm else None
        self.register_parameter("key_norm", ones)

    def reset_parameters(self) -> None:
        """Set the queries to zero and the key-norm weights to one, as the paper starts them."""
        nn.init.zeros_(self.query)
        if self.key_norm is not None:
            nn.init.ones_(self.key_norm)

    def extra_repr(self) -> str:
        """Show the shape."""
        reads, width = self.query.shape
        return f"reads={reads}, width={width}, key_norm={self.key_norm is not None}"
