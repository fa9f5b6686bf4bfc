"""The read as a model-local ONNX function in the form that TensorRT's compiler fuses best.

Importing this module needs ``onnx`` and ``onnx_ir``. Beside the rules of ``onnx_functions``:

- Reads are plain, not in two phases: the compiler finds by itself that a source's statistics serve all later reads,
  and computes them where the source is made.
- What is mixed is multiplied by 1, made of the read's own weights. The compiler knows neither its value nor a way to
  have it earlier. Without it, the cast of a source to fp32, common to all reads, is kept in memory in place of the
  source, and every read's kernel falls apart at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

import onnx_ir as ir
from onnx import AttributeProto, FunctionProto, TensorProto, helper

from attnres_compile.exporters.onnx_functions import DEPTH_ATTENTION, DOMAIN, INTER_BLOCK
from attnres_compile.passes._nodes import line_of

# The names of the nodes that weigh and sum the sources, by which a kernel is known as the one that mixes.
MIX: Final = "mix"
_TRACE: Final = "pkg.torch.onnx.stack_trace"


@dataclass(frozen=True)
class Read:
    """A read's node: its name, its type, and the nodes that make its sources, None for an input of the model."""

    name: str
    kind: str
    sources: tuple[str | None, ...]


@dataclass(frozen=True)
class Form:
    """What ``set_form`` found in a file.

    Attributes:
        reads: the reads, in order.
        places: lines of the user's source by name of node.
        inputs: the inputs' sizes by name, dynamic ones as text.
    """

    reads: tuple[Read, ...]
    places: dict[str, str]
    inputs: dict[str, tuple[int | str, ...]]


def set_form(path: str | PathLike[str], target: str | PathLike[str]) -> Form:
    """Write an ONNX file again with this module's functions behind its reads.

    Args:
        path: the file; weights beside it are found there.
        target: where to write; weights beyond 1.5 GB lie beside it.
    """
    model = ir.load(path)
    nodes = [node for node in model.graph.all_nodes() if node.domain == DOMAIN and not _is_phase_one(node)]
    for name in {node.op_type for node in nodes if _sources(node.op_type)}:
        function = ir.serde.deserialize_function(function_proto(_sources(name), model.opset_imports[""]))
        model.functions[function.identifier()] = function
    values = [value.const_value for value in model.graph.initializers.values()]
    beside = sum(value.nbytes for value in values if value is not None) > 1.5e9
    ir.save(model, target, external_data=f"{Path(target).name}.data" if beside else None)
    traces = {str(node.name): node.metadata_props.get(_TRACE, "") for node in model.graph.all_nodes()}
    return Form(
        tuple(Read(str(node.name), node.op_type, tuple(map(_maker, _mixed(node)))) for node in nodes),
        {name: line for name, trace in traces.items() if (line := line_of(trace))},
        {str(value.name): tuple(_size(size) for size in value.shape or ()) for value in model.graph.inputs},
    )


def _is_phase_one(node: Any) -> bool:
    return isinstance(node, ir.Node) and node.domain == DOMAIN and node.op_type.startswith(INTER_BLOCK)


def _mixed(node: ir.Node) -> list[ir.Value | None]:
    """What a read mixes: the sources of a plain one, or the finished blocks and the partial sum of a merge."""
    if _sources(node.op_type):
        return list(node.inputs[2:])
    phase: Any = node.inputs[0] and node.inputs[0].producer()
    blocks = list(phase.inputs[2:]) if _is_phase_one(phase) else []
    return [*blocks, node.outputs[0] if node.op_type.startswith("Add") else node.inputs[2]]


def _maker(value: ir.Value | None) -> str | None:
    node = value and value.producer()
    return node.name if node else None


def _size(size: int | ir.SymbolicDim) -> int | str:
    return size if isinstance(size, int) else str(size.value)


def function_proto(n: int, opset: int) -> FunctionProto:
    """``DepthAttentionN<n>``: inputs, outputs and attributes as ``onnx_functions`` has them, another body.

    Args:
        n: number of sources.
        opset: version of the standard operator set.
    """
    name = f"{DEPTH_ATTENTION}{n}"
    prefix = f"{DOMAIN}_{name}"
    nodes: list[Any] = []

    def op(kind: str, *inputs: str, part: str = "part", **attributes: Any) -> str:
        output = f"{prefix}_{part}_{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def attribute(attribute: str) -> str:
        output = op("Constant")
        proto = AttributeProto(name="value_float", ref_attr_name=attribute, type=AttributeProto.FLOAT)
        nodes[-1].attribute.append(proto)
        return output

    def wide(value: str) -> str:
        return op("Cast", value, to=TensorProto.FLOAT)

    query, key_norm, *sources = formals = [f"{prefix}_{x}" for x in ("query", "key_norm", *(f"v{i}" for i in range(n)))]
    eps, last = attribute("eps"), op("Constant", value_ints=[-1])
    key = op("Mul", wide(query), wide(key_norm))
    logits = []
    for x in map(wide, sources):
        mean = op("ReduceMean", op("Mul", x, x), last, keepdims=1)
        dot = op("ReduceSum", op("Mul", x, key), last, keepdims=1)
        logits.append(op("Div", dot, op("Sqrt", op("Add", mean, eps))))
    largest = op("Max", *logits)
    weights = [op("Exp", op("Sub", logit, largest)) for logit in logits]
    total = op("Sum", *weights)
    # The largest weight is exp(0) = 1, so that their sum is at least 1.
    one = op("CastLike", op("Min", total, op("Constant", value_float=1.0)), sources[0])
    same = [wide(op("Mul", source, one)) for source in sources]
    mixed = [op("Mul", weight, x, part=MIX) for weight, x in zip(weights, same, strict=True)]
    h = op("Mul", op("Div", op("Sum", *mixed, part=MIX), total, part=MIX), attribute("scale"), part=MIX)
    output = f"{prefix}_h"
    nodes.append(helper.make_node("CastLike", [h, sources[0]], [output], name=output))
    return helper.make_function(
        DOMAIN,
        name,
        formals,
        [output],
        nodes,
        [helper.make_opsetid("", opset)],
        attributes=["plugin_namespace", "plugin_version"],
        attribute_protos=[helper.make_attribute("eps", 1e-6), helper.make_attribute("scale", 1.0)],
    )


def _sources(kind: str) -> int:
    """Number of sources of a type of node, 0 if it is no read."""
    count = kind.removeprefix(DEPTH_ATTENTION)
    return int(count) if count != kind and count.isdecimal() else 0
