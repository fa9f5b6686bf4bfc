"""An ONNX file becomes an engine, with TensorRT or TensorRT-RTX, and the builder's log a list of kernels."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Final

from attnres_compile.errors import ExportError, MissingDependencyError, OptionError

TENSORRT: Final = "tensorrt"
TENSORRT_RTX: Final = "tensorrt_rtx"
RTX_TARGETS: Final = (80, 86, 89, 120)

_EXTRAS: Final = {TENSORRT: "tensorrt", TENSORRT_RTX: "tensorrt-rtx"}
# Entries of the compiled program that start no kernel.
_NO_KERNELS: Final = frozenset({"shape_call", "signal", "wait"})

Range = tuple[int, int, int]


@dataclass(frozen=True)
class Tensor:
    """A tensor that kernels hand to each other: its name, its sizes, -1 where dynamic, and its type."""

    name: str
    sizes: tuple[int, ...]
    dtype: str

    @property
    def wide(self) -> bool:
        """Whether it holds features, not one value a token."""
        return self.sizes[-1:] != (1,)


@dataclass(frozen=True)
class Kernel:
    """A kernel of the compiled program.

    Attributes:
        name: the compiler's name, which lists the operations.
        kind: ``kgen`` (generated), ``gemm``, ``runtime_fusion`` (generated around a matrix product), ...
        layers: the ONNX nodes in it; for one inside a function ``node | call (function)``.
        loads: tensors that it reads, without constants.
        stores: tensors that it writes.
    """

    name: str
    kind: str
    layers: tuple[str, ...]
    loads: tuple[Tensor, ...]
    stores: tuple[Tensor, ...]


@dataclass(frozen=True)
class Engine:
    """A serialized engine, and what the builder's log says about it."""

    data: Any
    kernels: tuple[Kernel, ...]
    activation_bytes: int


def package(name: str | None, targets: Sequence[int] | None) -> tuple[Any, tuple[int, ...]]:
    """The module that builds, and the compute capabilities that it builds for: none for the GPU at hand.

    Args:
        name: ``tensorrt``, ``tensorrt_rtx``, or None for the first if it can be imported, no targets being given.
        targets: compute capabilities without their dot; None for those of the GPU at hand, or ``RTX_TARGETS``.

    Raises:
        OptionError: the name is neither, or the package cannot build for a target.
        MissingDependencyError: the package is not installed, or cannot be loaded.
    """
    if name not in (None, *_EXTRAS):
        raise OptionError(f"runtime is 'tensorrt' or 'tensorrt_rtx', got {name!r}")
    module: Any = None
    for candidate in [name] if name else [TENSORRT, TENSORRT_RTX] if targets is None else [TENSORRT_RTX]:
        try:
            module = importlib.import_module(str(candidate))
            break
        except Exception as error:  # a library that cannot be loaded is no ImportError
            reason = f"{candidate} cannot be imported ({error})"
    if module is None:
        extra = _EXTRAS[name or TENSORRT_RTX]
        raise MissingDependencyError(f"TensorRT export: {reason}; pip install 'attnres-compile[{extra}]'")
    if module.__name__ == TENSORRT:
        if targets is not None:
            raise OptionError(
                "tensorrt builds for the GPU at hand; leave compute_capabilities out, or use tensorrt_rtx"
            )
        return module, ()
    known = sorted(int(n[2:]) for n in dir(module.ComputeCapability) if re.fullmatch(r"SM\d+", n))
    chosen = tuple(RTX_TARGETS if targets is None else targets)
    if not chosen or any(target not in known for target in chosen):
        listed = ", ".join(map(str, known))
        raise OptionError(f"compute_capabilities: tensorrt_rtx {module.__version__} has {listed}; got {list(chosen)}")
    return module, chosen


def build(
    trt: Any,
    onnx_file: str | PathLike[str],
    profile: Mapping[str, Sequence[Range]],
    targets: Sequence[int],
    places: Mapping[str, str],
) -> Engine:
    """Build an engine whose types are those of the ONNX file (a strongly typed network).

    Args:
        trt: the module ``tensorrt`` or ``tensorrt_rtx``.
        onnx_file: the file.
        profile: for each input with dynamic axes, the smallest, usual and largest size of every axis.
        targets: compute capabilities; none for the GPU at hand.
        places: lines of the user's source by name of ONNX node, for error messages.

    Raises:
        ExportError: the parser or the builder rejects the model.
    """
    log = _log(trt)
    builder = trt.Builder(log)
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(onnx_file)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        names = [node for error in errors for node in (error.node_name(), *error.local_function_stack())]
        _fail(trt, "parser", [error.desc() for error in errors], names, places)
    _allow_decomposed_attention(trt, network)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # the list of kernels
    if targets:
        config.num_compute_capabilities = len(targets)
        for i, target in enumerate(targets):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{target}"), i)
    if profile:
        shapes = builder.create_optimization_profile()
        for name, ranges in profile.items():
            shapes.set_shape(name, *zip(*ranges, strict=True))
        config.add_optimization_profile(shapes)
    data = builder.build_serialized_network(network, config)
    if data is None:
        _fail(trt, "builder", log.errors, re.findall(r"\bnode_\w+", " ".join(log.errors)), places)
    text = "\n".join(log.lines)
    memory = re.findall(r"^Total Activation Memory: (\d+)", text, re.MULTILINE)
    return Engine(data, kernels(text), sum(map(int, memory)))


def kernels(log: str) -> tuple[Kernel, ...]:
    """The kernels of the last engine in a builder's verbose log, in order; host code on sizes is none of them.

    With several compute capabilities the compiler lists the program of one of them.
    """
    start = max(log.rfind("\nLayers:\n"), 0)
    found = [_kernel(line) for line in re.findall(r"^Name: .*?, LayerType: .*$", log[start:], re.MULTILINE)]
    return tuple(kernel for kernel in found if kernel.kind not in _NO_KERNELS and not _on_sizes(kernel))


def _kernel(line: str) -> Kernel:
    name, kind = re.findall(r"^Name: (.*?), LayerType: (\w+)", line)[0]
    layers = re.findall(r"\[ONNX Layer: ([^\]]*)\]", line)
    loads, stores = re.findall(r"Inputs: \[(.*)\], Constants: .*, Outputs: \[(.*?)\], TacticName:", line)[0]
    return Kernel(name, kind, tuple(layers), _tensors(loads), _tensors(stores))


def _tensors(text: str) -> tuple[Tensor, ...]:
    found = re.findall(r"\{ Name: (.*?), Dimensions: \[([^\]]*)\].*?Datatype: (\w+)", text)
    return tuple(Tensor(name, tuple(int(n) for n in sizes.split(",") if n), dtype) for name, sizes, dtype in found)


def _on_sizes(kernel: Kernel) -> bool:
    return all(tensor.dtype == "Int64" and tensor.sizes in ((), (1,)) for tensor in (*kernel.loads, *kernel.stores))


def _log(trt: Any) -> Any:
    """A logger that keeps everything; the classes to derive from are those of the package at hand."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[str] = []
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            self.lines.append(message)
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)

    return Log()


def _allow_decomposed_attention(trt: Any, network: Any) -> None:
    """Where no attention kernel fits (fp32, odd head sizes), the builder would give up instead of using others."""
    for i in range(network.num_layers) if hasattr(trt, "IAttentionInputLayer") else ():
        layer = network.get_layer(i)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # the package's own way of a cast
            layer.attention.decomposable = True


def _fail(trt: Any, who: str, messages: Iterable[str], nodes: Iterable[str], places: Mapping[str, str]) -> None:
    """Raise what was said, with the ONNX nodes that are named and their lines in the user's source."""
    said = "; ".join(dict.fromkeys(message.strip() for message in messages)) or "no reason given"
    known = [f"{node} ({places[node]})" for node in dict.fromkeys(nodes) if node in places]
    where = f"\nat {', '.join(known)}" if known else ""
    raise ExportError(f"{trt.__name__}'s {who} rejects the model: {said}{where}")
