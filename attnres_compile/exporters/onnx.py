"""One ONNX file for every runtime: depth attention as custom nodes, each with a model-local function behind it.

ONNX Runtime inlines the functions. TensorRT takes a plugin of the node's name, ``plugin_namespace`` and
``plugin_version`` when one is registered, and the function otherwise.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from attnres_compile.capture.copies import program_with
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import ExportError, MissingDependencyError, OptionError
from attnres_compile.exporters.example_call import (
    ExampleCall,
    Outputs,
    Shapes,
    axis_names,
    dynamic_shapes_of,
    enlarged,
    evaluated,
    example_call,
    other_sizes,
    without_names,
)
from attnres_compile.exporters.node_types import DOMAIN
from attnres_compile.exporters.staging import publish, staging_folder
from attnres_compile.passes._nodes import location
from attnres_compile.passes.base import Pass, Subject, run
from attnres_compile.passes.join_phases import JoinPhases
from attnres_compile.passes.remove_dead import RemoveDead

if TYPE_CHECKING:
    import onnx_ir as ir

Target = Literal["onnxruntime", "tensorrt"]
Body = Literal["unrolled", "tied", "stacked", "matmul"]

# As measured: fewest passes over memory, and one kernel a read.
BODIES: Final[dict[Target, Body]] = {"onnxruntime": "matmul", "tensorrt": "tied"}

# torch's exporter writes invalid models above, and its converter reaches no lower.
OPSETS: Final = range(20, 26)


@dataclass(frozen=True)
class OnnxExport:
    """What ``export_onnx`` wrote.

    Attributes:
        path: the file.
        nodes: number of custom nodes by type, e.g. ``{"DepthAttentionN2": 1, "Merge": 4}``.
        functions: types of the custom nodes that have a function in the file: all of them.
        parity: the outputs' names, each with its largest absolute difference between ONNX Runtime and PyTorch.
        atol: what no difference exceeds; None where nothing was compared.
    """

    path: Path
    nodes: dict[str, int]
    functions: tuple[str, ...]
    parity: tuple[tuple[str, float], ...]
    atol: float | None


def export_onnx(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] | dict[str, Any] | Tensor | None,
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: Shapes | None = None,
    opset_version: int = 23,
    atol: float | None = 1e-4,
    output: Callable[[Any], Any] | None = None,
    target: Target = "onnxruntime",
    body: Body | None = None,
    echo: Callable[[str], None] | None = print,
) -> OnnxExport:
    """Export a model to one ONNX file, and compare the file with PyTorch before it gets its name.

    The model runs in eval mode, without gradients and, where its ``forward`` has ``use_cache``, without a cache. The
    depth-attention operators become nodes of domain ``attnres_compile``: ``DepthAttentionN<n>`` for n sources,
    ``InterBlockN<n>S<s>`` for s reads of n blocks at once, and ``Merge``. Weights beyond 1.5 GB lie beside the file, in
    ``<path>.data``. The file passes ONNX's checker and runs in ONNX Runtime, on the example inputs and, with dynamic
    axes, at other sizes. Its metadata name the version, the form and the blocks.

    Args:
        model: a module in fp32, fp16 or bf16 (which ONNX Runtime cannot run on the CPU: not compared), or an
            ExportedProgram.
        args: example inputs: a tensor, a tuple, a mapping of keyword inputs such as a BatchEncoding; None for those of
            the ExportedProgram, or for some made from a Hugging Face model's config.
        path: the file; an existing one is replaced.
        dynamic_shapes: as ``torch.export.export`` takes them; parameters left out are static, ``{}`` makes all static.
            None: axis 0 of all tensors is dynamic, and axis 1 of integer tensors ``[batch, length]``.
        opset_version: version of the standard operator set, 20 to 25.
        atol: largest absolute difference that is allowed between ONNX Runtime and PyTorch; None does not compare.
        output: picks what is exported from the model's result, e.g. ``operator.attrgetter("logits")``; None exports all
            its tensors.
        target: the runtime whose measurements choose the schedule and ``body``; every runtime takes every form. Reads
            are in two phases for ``onnxruntime``, and in one for ``tensorrt``, whose compiler then does better.
        body: form of the functions behind the nodes: ``matmul`` (fastest in ONNX Runtime), ``tied`` (one kernel a read
            in TensorRT), ``unrolled`` (source by source) or ``stacked`` (the equations as written); None: the target's.
        echo: takes a line for each output's comparison, and one for the file; None for silence.

    Returns:
        What was written.

    Raises:
        MissingDependencyError: onnx, onnxscript, onnx-ir or onnxruntime is missing.
        OptionError: ``opset_version``, ``target`` or ``body`` is none of those named, or ``dynamic_shapes`` is given
            for an ExportedProgram.
        InputError: the example inputs do not fit the model.
        ExportError: the path cannot be written to; the model cannot be captured or translated; the checker or ONNX
            Runtime rejects the result; a difference exceeds ``atol``. No file is left behind.
    """
    _check_dependencies()
    _check_options(model, dynamic_shapes, opset_version, target, body)
    say = echo or (lambda line: None)
    destination = Path(path)
    with staging_folder(destination) as folder, quiet():
        call = example_call(model, args, output)
        with evaluated(call.module):
            expected = call.outputs()
            program, names = capture(model, call, dynamic_shapes)
            program = _prepared(program, (JoinPhases(), RemoveDead()) if target == "tensorrt" else ())
            runs = [] if atol is None else _runs(program, call, expected)
            translated = _translate(program, names, [name for name, _ in expected], opset_version)
            nodes = _add_functions(translated, body or BODIES[target])
            _describe(translated, model, nodes, {"target": target, "body": body or BODIES[target]})
            _save_and_check(translated, folder / destination.name)
            if _in_bfloat16(program):
                atol = None
                say("– parity not run: ONNX Runtime has no bfloat16 MatMul on the CPU; the checker accepts the file")
            parity = () if atol is None else _compare(folder / destination.name, runs, atol, say)
        publish(folder, destination)
    listing = ", ".join(f"{name} ×{count}" for name, count in nodes.items()) or "no custom nodes"
    say(f"✓ {destination}: {listing}")
    return OnnxExport(destination, nodes, tuple(nodes), parity, atol)


def _check_dependencies() -> None:
    for module in ("onnx", "onnxscript", "onnx_ir", "onnxruntime"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise MissingDependencyError(
                f"ONNX export needs {module}, which cannot be imported ({error}): pip install 'attnres-compile[onnx]'"
            ) from error


def _check_options(
    model: nn.Module | ExportedProgram, shapes: Shapes | None, opset: int, target: str, body: str | None
) -> None:
    if target not in BODIES:
        raise OptionError(f"target is one of {', '.join(BODIES)}; got {target!r}")
    if body not in (None, *get_args(Body)):
        raise OptionError(f"body is one of {', '.join(get_args(Body))}; got {body!r}")
    if opset not in OPSETS:
        raise OptionError(f"opset_version is {OPSETS[0]} to {OPSETS[-1]}, got {opset}")
    if isinstance(model, ExportedProgram) and shapes is not None:
        raise OptionError("the dynamic shapes of an ExportedProgram are fixed; give them to torch.export.export")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what torch's exporter says about itself, which nobody who exports a model can act on."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)  # a list of the torchvision operators that are not there
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
            yield
    finally:
        logger.setLevel(level)


def capture(
    model: nn.Module | ExportedProgram, call: ExampleCall, given: Shapes | None
) -> tuple[ExportedProgram, dict[str, str]]:
    """The exported program, and names for its dynamic axes."""
    if isinstance(model, ExportedProgram):
        return model, {}
    shapes = dynamic_shapes_of(call, given)
    captured = enlarged(call, shapes)
    try:
        with torch.no_grad():
            program = torch.export.export(
                call.module, captured.args, captured.kwargs, dynamic_shapes=without_names(shapes), strict=False
            )
    except Exception as error:
        raise ExportError(
            f"torch.export cannot capture the model with dynamic_shapes={shapes}: {error}\n"
            "If an axis cannot be dynamic, leave it out of dynamic_shapes."
        ) from error
    return program, axis_names(program, shapes)


def _prepared(program: ExportedProgram, passes: tuple[Pass, ...]) -> ExportedProgram:
    """The program after the passes, in which no view depends on strides that torch's exporter has otherwise later.

    The implementations of attention lay their results out each in its own way: a copy has one layout in all.
    """
    module = fx.GraphModule(program.graph_module, copy.deepcopy(program.graph_module.graph))
    aten = torch.ops.aten
    layout: dict[str, Any] = {"memory_format": torch.contiguous_format}
    for node in module.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
    for node in module.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        with module.graph.inserting_after(node):
            laid_out = module.graph.call_function(aten.clone.default, (node,), layout)
        laid_out.meta = dict(node.meta)
        node.replace_all_uses_with(laid_out, lambda user, laid_out=laid_out: user is not laid_out)
    run(passes, Subject(module, AttnResConfig()))
    return program_with(program, module)


def _translate(
    program: ExportedProgram, axes: dict[Any, str], outputs: list[str], opset: int
) -> torch.onnx.ONNXProgram:
    from attnres_compile.exporters.onnx_translation import translation_table

    table = translation_table(opset)
    for node in program.graph.nodes:
        if node.target in table and any(t.dtype == torch.float64 for t in _tensors(node.meta["val"])):
            raise ExportError(f"the exported functions compute in float32: convert the model with .float() ({node})")
    try:
        translated = torch.onnx.export(
            program,
            output_names=outputs,
            opset_version=opset,
            custom_translation_table=table,
            verbose=False,
            dynamo=True,
            optimize=False,
        )
    except Exception as error:
        raise ExportError(f"torch.onnx cannot translate the model: {_cause(error, program)}") from error
    assert translated is not None
    if translated.model.opset_imports[""] != opset:
        raise ExportError(f"torch.onnx cannot convert this model to opset {opset}; 23 needs no conversion")
    _simplify(translated.model)
    translated.rename_axes(axes)
    return translated


def _cause(error: Exception, program: ExportedProgram) -> str:
    """The first line of what went wrong first, and the line of the user's source that it is about."""
    first, place = error, ""
    while isinstance(first.__cause__, Exception):
        first = first.__cause__
        # Decomposition numbers the nodes anew: the first of a kind alone keeps its name.
        named = re.search(r"node %(\w+)", str(first))
        name = named[1] if named and not re.search(r"_\d+$", named[1]) else None
        found = [node for node in program.graph.nodes if node.name == name]
        place = f" ({location(found[0])})" if found else place
    return f"{str(first).partition(chr(10))[0]}{place}"


def _simplify(model: ir.Model) -> None:
    """Fold constants and drop what is unused, without fusions and rewrite rules.

    Of torch's own fusions, that of rotary embeddings (onnxscript 0.7) loses the broadcast of cos and sin over the
    batch; the default rules of onnxscript take time quadratic in the number of nodes.
    """
    import onnx_ir.passes.common as common
    from onnx_ir.passes import Sequential
    from onnxscript import optimizer

    optimizer.inline(model)
    optimizer.fold_constants(model, onnx_shape_inference=True)
    Sequential(
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)


def _tensors(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _add_functions(translated: torch.onnx.ONNXProgram, form: Body) -> dict[str, int]:
    """Give every type of custom node its function. Returns the number of custom nodes by type."""
    import onnx_ir as ir

    from attnres_compile.exporters.onnx_functions import function_proto

    model: ir.Model = translated.model
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    every = chain.from_iterable(ir.traversal.RecursiveGraphIterator(body) for body in bodies)
    nodes = Counter(node.op_type for node in every if node.domain == DOMAIN)
    for name in sorted(nodes):
        function = ir.serde.deserialize_function(function_proto(name, model.opset_imports[""], form))
        model.functions[function.identifier()] = function
    return dict(sorted(nodes.items()))


def _describe(translated: torch.onnx.ONNXProgram, model: Any, nodes: dict[str, int], options: dict[str, str]) -> None:
    """Say in the file's metadata what made it, and what of."""
    report = getattr(model, "attnres_report", None)
    kept = ("source", "width", "sublayers", "blocks", "reads")
    chains = (
        [{key: getattr(chain, key) for key in kept} for chain in report.chains if chain.rewritten] if report else []
    )
    values = {"version": version("attnres-compile"), **options, "nodes": json.dumps(nodes)}
    values |= {"model": report.model, "chains": json.dumps(chains)} if report else {}
    translated.model.metadata_props.update({f"attnres_compile.{key}": value for key, value in values.items()})


def _in_bfloat16(program: ExportedProgram) -> bool:
    values = chain.from_iterable(_tensors(node.meta.get("val")) for node in program.graph.nodes)
    return any(isinstance(value, Tensor) and value.dtype == torch.bfloat16 for value in values)


def _save_and_check(translated: torch.onnx.ONNXProgram, path: Path) -> None:
    import onnx

    translated.save(path)
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:
        raise ExportError(f"ONNX's checker rejects the exported model: {error}") from error


def _runs(program: ExportedProgram, call: ExampleCall, expected: Outputs) -> list[tuple[ExampleCall, Outputs]]:
    """The example call and, for a program with dynamic axes, the first of its other sizes that the model accepts."""
    refusals = []
    for other in other_sizes(program, call):
        try:
            return [(call, expected), (other, other.outputs())]
        except Exception as error:
            refusals.append(f"{[tuple(t.shape) for t in other.tensors()]}: {error}")
    if refusals:
        raise ExportError(
            "the model accepts no other size of its dynamic axes; leave those that are static out of dynamic_shapes. "
            "Tried " + "; ".join(refusals)
        )
    return [(call, expected)]


def _compare(
    path: Path, runs: list[tuple[ExampleCall, Outputs]], atol: float, say: Callable[[str], None]
) -> tuple[tuple[str, float], ...]:
    """Largest difference per output over all runs, reported line by line."""
    from attnres_compile.exporters.onnx_parity import Session, largest_difference

    session = Session(path)
    differences: dict[str, float] = {}
    for call, outputs in runs:
        actual = session.run(call.tensors())
        if len(actual) != len(outputs):
            raise ExportError(f"the exported model has {len(actual)} outputs, the model {len(outputs)}")
        for value, (name, expected) in zip(actual, outputs, strict=True):
            differences[name] = max(differences.get(name, 0.0), largest_difference(value, expected))
    for name, difference in differences.items():
        say(f"{'✓' if difference <= atol else '✗'} {name} max |Δ| {difference:.1e} (atol {atol:g})")
    wrong = [name for name, difference in differences.items() if not difference <= atol]
    if wrong:
        raise ExportError(f"the exported model differs from PyTorch by more than atol={atol:g} in {', '.join(wrong)}")
    return tuple(differences.items())
