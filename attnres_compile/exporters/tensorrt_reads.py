"""The reads of an ONNX file, and what became of each in an engine.

Importing this module needs ``onnx_ir`` and ``onnx``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Final

import onnx_ir as ir

from attnres_compile.exporters.node_types import DEPTH_ATTENTION, DOMAIN, INTER_BLOCK
from attnres_compile.exporters.onnx_functions import MIX
from attnres_compile.exporters.tensorrt_build import Kernel
from attnres_compile.passes._nodes import line_of

_TRACE: Final = "pkg.torch.onnx.stack_trace"


@dataclass(frozen=True)
class Read:
    """A read's node: its name, its type, and the nodes that make its sources, None for an input of the model."""

    name: str
    kind: str
    sources: tuple[str | None, ...]


@dataclass(frozen=True)
class Contents:
    """What an ONNX file holds.

    Attributes:
        reads: the reads, in order; of those in two phases, the second.
        places: lines of the user's source by name of node.
        inputs: the inputs' sizes by name, dynamic ones as text.
    """

    reads: tuple[Read, ...]
    places: dict[str, str]
    inputs: dict[str, tuple[int | str, ...]]


@dataclass(frozen=True)
class ReadKernels:
    """What became of one read.

    Attributes:
        node: name of its ONNX node.
        sources: number of its sources.
        mixing: kernels that weigh and sum its sources.
        statistics: other kernels that compute logits of its sources, most of them for several reads at once.
        plugin: whether a plugin took its place.
    """

    node: str
    sources: int
    mixing: tuple[str, ...]
    statistics: tuple[str, ...]
    plugin: bool = False


def contents(path: str | PathLike[str]) -> Contents:
    """Describe an ONNX file; its weights are not loaded."""
    model = ir.load(path)
    nodes = [node for node in model.graph.all_nodes() if node.domain == DOMAIN]
    reads = [node for node in nodes if not _is_phase_one(node)]
    traces = {str(node.name): node.metadata_props.get(_TRACE, "") for node in model.graph.all_nodes()}
    return Contents(
        tuple(Read(str(node.name), node.op_type, tuple(map(_maker, _mixed(node)))) for node in reads),
        {name: line for name, trace in traces.items() if (line := line_of(trace))},
        {str(value.name): tuple(_size(size) for size in value.shape or ()) for value in model.graph.inputs},
    )


def _is_phase_one(node: Any) -> bool:
    return isinstance(node, ir.Node) and node.domain == DOMAIN and node.op_type.startswith(INTER_BLOCK)


def _mixed(node: ir.Node) -> list[ir.Value | None]:
    """What a read mixes: the sources of a plain one, or the finished blocks and the partial sum of a merge."""
    if node.op_type.startswith(DEPTH_ATTENTION):
        return list(node.inputs[2:])
    phase: Any = node.inputs[0] and node.inputs[0].producer()
    blocks = list(phase.inputs[2:]) if _is_phase_one(phase) else []
    return [*blocks, node.outputs[0] if node.op_type.startswith("Add") else node.inputs[2]]


def _maker(value: ir.Value | None) -> str | None:
    node = value and value.producer()
    return node.name if node else None


def _size(size: int | ir.SymbolicDim) -> int | str:
    return size if isinstance(size, int) else str(size.value)


def read_kernels(reads: Sequence[Read], kernels: Sequence[Kernel]) -> tuple[tuple[ReadKernels, ...], int]:
    """The kernels of each read, and the number of tensors with features that they hand to each other."""
    found: list[ReadKernels] = []
    every: dict[str, Kernel] = {}
    for read in reads:
        call = f" | {read.name} ({read.kind})"
        own = [kernel for kernel in kernels if any(layer.endswith(call) for layer in kernel.layers)]
        mixing = [k for k in own if any(f"_{MIX}_" in layer and layer.endswith(call) for layer in k.layers)]
        plugin = not own and any(read.name in kernel.layers for kernel in kernels)
        other = tuple(kernel.name for kernel in own if kernel not in mixing)
        found.append(ReadKernels(read.name, len(read.sources), tuple(k.name for k in mixing), other, plugin))
        every |= {kernel.name: kernel for kernel in own}
    stored = {tensor.name: name for name, kernel in every.items() for tensor in kernel.stores if tensor.wide}
    loads = [(tensor.name, name) for name, kernel in every.items() for tensor in kernel.loads]
    return tuple(found), len({tensor for tensor, name in loads if stored.get(tensor, name) != name})
