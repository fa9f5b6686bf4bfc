"""A TensorRT engine from a model, by way of ONNX. No plugin is needed: TensorRT's own compiler fuses the reads.

Where a plugin is registered under a read's name, the parser takes that instead (``tensorrt_plugins``).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from attnres_compile.config import AttnResConfig
from attnres_compile.errors import ExportError, OptionError
from attnres_compile.exporters import tensorrt_build
from attnres_compile.exporters.example_call import (
    ExampleCall,
    Outputs,
    Shapes,
    dynamic_shapes_of,
    evaluated,
    example_call,
    is_axes,
)
from attnres_compile.exporters.onnx import BODIES, capture, export_onnx, quiet
from attnres_compile.exporters.staging import staging_folder
from attnres_compile.exporters.tensorrt_build import Range
from attnres_compile.exporters.tensorrt_plugins import register_plugins
from attnres_compile.passes.base import Pass, Subject, run
from attnres_compile.passes.fuse_neighbours import FuseNeighbours
from attnres_compile.passes.remove_dead import RemoveDead
from attnres_compile.passes.schedule_two_phase import ScheduleTwoPhase

if TYPE_CHECKING:
    from attnres_compile.exporters.tensorrt_reads import ReadKernels

PRECISIONS: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Largest difference between ONNX Runtime and PyTorch, relative to the largest value; it has no kernels for bf16.
TOLERANCES: Final = {"fp32": 1e-4, "fp16": 2e-2}

# A plugin is one kernel for a merge, the add before it and the norm after it. TensorRT itself fuses plain reads best.
FOR_PLUGINS: Final[tuple[Pass, ...]] = (ScheduleTwoPhase(), FuseNeighbours(), RemoveDead())


@dataclass(frozen=True)
class TensorRTExport:
    """What ``export_tensorrt`` wrote.

    Attributes:
        path: the engine.
        runtime: the package that built it, with its version.
        precision: fp32, fp16 or bf16.
        compute_capabilities: the GPUs it is for; empty for the one it was built on.
        profile: smallest, usual and largest size of every axis, for each input with dynamic axes.
        kernels: number of kernels, for one of the compute capabilities.
        reads: what became of each read, in order.
        sources: number of different sources of all reads.
        stored: tensors with features that the reads' kernels hand to each other; what exceeds ``sources`` is scratch.
        activation_bytes: memory for activations at the largest sizes.
        parity: largest difference between ONNX Runtime and PyTorch by output, relative to the largest value, of the
            ONNX file that the engine was built from; empty for bf16.
    """

    path: Path
    runtime: str
    precision: str
    compute_capabilities: tuple[int, ...]
    profile: dict[str, tuple[Range, ...]]
    kernels: int
    reads: tuple[ReadKernels, ...]
    sources: int
    stored: int
    activation_bytes: int
    parity: tuple[tuple[str, float], ...]


def export_tensorrt(
    model: nn.Module,
    args: tuple[Any, ...] | dict[str, Any] | Tensor | None,
    path: str | os.PathLike[str],
    *,
    precision: str = "fp32",
    compute_capabilities: Sequence[int] | None = None,
    dynamic_shapes: Shapes | None = None,
    output: Callable[[Any], Any] | None = None,
    runtime: str | None = None,
    plugins: bool = False,
    opset_version: int = 23,
    echo: Callable[[str], None] | None = print,
) -> TensorRTExport:
    """Build a TensorRT engine of a model.

    The model, or a copy of it in another precision, is exported to ONNX, with reads in one phase and in the form that
    TensorRT's compiler fuses. ONNX Runtime compares that file with the model (fp32 and fp16); the engine itself is not
    run. Types in the engine are those of the model (a strongly typed network), the reads' inner values fp32.

    Args:
        model: a module; it is left as it is.
        args: example inputs, as in ``export_onnx``.
        path: the engine; an existing one is replaced.
        precision: fp32, fp16 or bf16, of all parameters, buffers and floating-point inputs.
        compute_capabilities: GPUs to build for, as 86 for 8.6; needs ``tensorrt_rtx``. None: those of
            ``tensorrt_build.RTX_TARGETS`` there, and the GPU at hand with ``tensorrt``.
        dynamic_shapes: by parameter of ``forward``, and by axis: ``(smallest, usual, largest)``, or a ``Dim`` with
            bounds, whose usual size is the example's. None: all axes are static.
        output: picks what is exported from the model's result.
        runtime: ``tensorrt``, ``tensorrt_rtx``, or None for the first of them that can be imported and do it.
        plugins: let the reads be plugins (``register_plugins``), whose kernels the engine carries with it: two phases,
            and one kernel for a read, the add before it and the norm after it. Needs ``tensorrt``.
        opset_version: version of ONNX's standard operator set, 20 to 25.
        echo: takes lines on progress; None for silence.

    Returns:
        What was written, with the kernels of each read.

    Raises:
        MissingDependencyError: neither package can be imported, or one for ONNX.
        OptionError: the precision, a compute capability or the dynamic shapes are wrong.
        InputError: the example inputs do not fit the model.
        ExportError: the path cannot be written to; the model cannot be captured or translated; ONNX Runtime's results
            differ; TensorRT rejects the model, with the ONNX node and the line in the user's source. No file is left.
    """
    if precision not in PRECISIONS:
        raise OptionError(f"precision is one of {', '.join(PRECISIONS)}; got {precision!r}")
    trt, targets = tensorrt_build.package(runtime, compute_capabilities)
    if plugins and trt.__name__ != tensorrt_build.TENSORRT:
        raise OptionError(f"{trt.__name__} takes no plugins; leave plugins out, or build with tensorrt")
    target, say = Path(path), echo or (lambda line: None)
    with staging_folder(target) as folder, quiet():
        dtype = PRECISIONS[precision]
        call = _call(_at_precision(model, dtype), args, output, dtype)
        ranges = _ranges(call, dynamic_shapes)
        with evaluated(call.module):
            expected = call.outputs()
            program, _ = capture(call.module, call, _shapes(call, ranges))
        if plugins:
            run(FOR_PLUGINS, Subject(program.graph_module, AttnResConfig()))
        file = folder / "model.onnx"
        exported = export_onnx(
            program,
            None,
            file,
            opset_version=opset_version,
            target="onnxruntime" if plugins else "tensorrt",
            body=BODIES["tensorrt"],
            atol=None,
            echo=None,
        )
        from attnres_compile.exporters.tensorrt_reads import contents, read_kernels

        found = contents(file)
        if plugins:
            register_plugins(exported.nodes)
        parity = _compare(file, call, expected, precision)
        profile = _profile(found.inputs, ranges)
        engine = tensorrt_build.build(trt, file, profile, targets, found.places)
        (folder / "engine").write_bytes(engine.data)
        os.replace(folder / "engine", target)
    reads, stored = read_kernels(found.reads, engine.kernels)
    result = TensorRTExport(
        path=target,
        runtime=f"{trt.__name__} {trt.__version__}",
        precision=precision,
        compute_capabilities=targets,
        profile=profile,
        kernels=len(engine.kernels),
        reads=reads,
        sources=len({source for read in found.reads for source in read.sources}),
        stored=stored,
        activation_bytes=engine.activation_bytes,
        parity=parity,
    )
    say(f"✓ {target}: {result.kernels} kernels, {len(reads)} reads, {precision}, {result.runtime}")
    return result


def _at_precision(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of the model in this type, or the model itself if it has it already."""
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.dtype == dtype for tensor in tensors if tensor.is_floating_point()):
        return model
    return copy.deepcopy(model).to(dtype)


def _call(model: nn.Module, args: Any, output: Callable[[Any], Any] | None, dtype: torch.dtype) -> ExampleCall:
    """The call that is exported, its floating-point inputs in this type."""
    call = example_call(model, args, output)

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return ExampleCall(call.module, *pytree.tree_map(cast, (call.args, call.kwargs)))


def _ranges(call: ExampleCall, given: Shapes | None) -> list[dict[int, Range]]:
    """Ranges of the dynamic axes of every tensor input, in order."""
    shapes = dynamic_shapes_of(call, {} if given is None else given)
    arguments = call.arguments()
    unknown = [name for name in shapes if name not in arguments]
    if unknown:
        raise OptionError(f"dynamic_shapes names {unknown[0]!r}; the inputs are {', '.join(arguments)}")
    found = []
    for name, value in arguments.items():
        leaves = pytree.tree_leaves(value)
        specs = [None] * len(leaves) if shapes[name] is None else pytree.tree_leaves(shapes[name], is_leaf=is_axes)
        if len(specs) != len(leaves):
            raise OptionError(f"dynamic_shapes[{name!r}] has axes of {len(specs)} tensors; there are {len(leaves)}")
        for leaf, spec in zip(leaves, specs, strict=True):
            if isinstance(leaf, Tensor):
                axes = spec.items() if isinstance(spec, Mapping) else enumerate(spec or ())
                found.append({axis: _range(name, axis, dim, leaf) for axis, dim in axes if dim is not None})
    return found


def _range(name: str, axis: int, dim: Any, leaf: Tensor) -> Range:
    where = f"dynamic_shapes[{name!r}], axis {axis}"
    if not 0 <= axis < leaf.dim():
        raise OptionError(f"{where}: the example has {leaf.dim()} axes")
    size = leaf.shape[axis]
    if isinstance(dim, tuple | list):
        found = tuple(dim)
    else:
        found = (getattr(dim, "min", None), size, getattr(dim, "max", None))
    if len(found) != 3 or not all(isinstance(n, int) for n in found):
        raise OptionError(f"{where}: give (smallest, usual, largest) or a Dim with min and max; got {dim}")
    smallest, usual, largest = found
    if not 1 <= smallest <= usual <= largest or not smallest <= size <= largest:
        raise OptionError(f"{where}: 1 <= smallest <= usual, example <= largest; got {found} and an example of {size}")
    return smallest, usual, largest


def _shapes(call: ExampleCall, ranges: list[dict[int, Range]]) -> dict[str, Any]:
    """The ranges as ``torch.export`` takes them, by parameter."""
    remaining = iter(ranges)

    def axes(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None
        return {
            i: Dim.DYNAMIC(min=low, max=high) for i, (low, _, high) in next(remaining).items() if low < high
        } or None

    return {name: pytree.tree_map(axes, value) for name, value in call.arguments().items()}


def _profile(
    inputs: Mapping[str, tuple[int | str, ...]], ranges: list[dict[int, Range]]
) -> dict[str, tuple[Range, ...]]:
    """The optimization profile: the sizes of the ONNX file's inputs, dynamic ones as their ranges."""
    if len(inputs) != len(ranges):
        raise ExportError(f"the exported model has the inputs {list(inputs)}, the call has {len(ranges)} tensors")
    named: dict[str, tuple[str, Range]] = {}
    for (name, sizes), axes in zip(inputs.items(), ranges, strict=True):
        for axis, size in enumerate(sizes):
            if isinstance(size, str):
                first, known = named.setdefault(size, (name, axes[axis]))
                if known != axes[axis]:
                    raise OptionError(f"the model makes axes of {first} and {name} equal: {known} against {axes[axis]}")
    return {
        name: tuple((size, size, size) if isinstance(size, int) else axes[i] for i, size in enumerate(sizes))
        for (name, sizes), axes in zip(inputs.items(), ranges, strict=True)
        if any(isinstance(size, str) for size in sizes)
    }


def _compare(path: Path, call: ExampleCall, expected: Outputs, precision: str) -> tuple[tuple[str, float], ...]:
    """Largest difference of each output from PyTorch's, relative to its largest value."""
    if precision not in TOLERANCES:
        return ()
    from attnres_compile.exporters.onnx_parity import Session, largest_difference

    actual = Session(path).run(call.tensors())
    sizes = [float(value.abs().max()) if value.numel() else 0.0 for _, value in expected]
    found = [
        (name, largest_difference(result, value) / (size or 1.0))
        for result, (name, value), size in zip(actual, expected, sizes, strict=True)
    ]
    wrong = [f"{name} {error:.1e}" for name, error in found if not error <= TOLERANCES[precision]]
    if wrong:
        allowed = TOLERANCES[precision]
        raise ExportError(
            f"ONNX Runtime and PyTorch differ by more than {allowed:g} of the largest: {', '.join(wrong)}"
        )
    return tuple(found)
