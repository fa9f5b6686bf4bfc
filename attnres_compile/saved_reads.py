"""What a reader keeps of its read for the backward: the merge that made it, instead of another tensor.

A norm that reads keeps its input. The merge before it keeps the blocks, which all reads share, and the partial sum,
which the next one starts from: enough to make the read anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from attnres_compile.ops.merge import can_read_again, read_again


class _Pack:
    """Takes the edge to its merge for each of the reads."""

    def __init__(self, reads: Sequence[Tensor]) -> None:
        # Not the reads themselves, which would then live as long as the node. An edge owns its node, as a read's
        # `grad_fn` need not: where the reader detaches what it reads, nothing else does.
        self.edges = {_identity(read): get_gradient_edge(read) for read in reads}

    def __call__(self, tensor: Tensor) -> Any:
        return self.edges.get(_identity(tensor), tensor)


def _unpack(kept: Any) -> Tensor:
    return kept if isinstance(kept, Tensor) else read_again(kept.node)


def keep_merges(reads: Sequence[Tensor]) -> None:
    """From here on, and until `stop_keeping`, autograd keeps the merges instead of the reads.

    Not where others look after what is kept (checkpointing, offloading): autograd asks one of them only.
    """
    merged = [read for read in reads if can_read_again(read.grad_fn)]
    if merged and _top() is None and torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        torch._C._autograd._push_saved_tensors_default_hooks(_Pack(merged), _unpack)


def stop_keeping() -> None:
    """Autograd keeps tensors again."""
    top = _top()
    if top is not None and isinstance(top[0], _Pack):
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _top() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    memory = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
    return *memory, tensor.dtype, tensor._version
