"""From ``torch.ops.attnres_compile.*`` to bare ONNX nodes of domain ``attnres_compile``.

Importing this module needs ``onnx``, ``onnxscript`` and ``onnx_ir``. torch.onnx inlines every onnxscript function that
a translation calls, so a translation emits a node without a body here, and the exporter adds the bodies afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import onnx_ir as ir
import torch
from onnx.defs import OpSchema
from onnxscript.function_libs.torch_lib.ops.core import aten_unbind
from onnxscript.values import Op, Opset

from attnres_compile.exporters.onnx_functions import (
    DEPTH_ATTENTION,
    DOMAIN,
    MERGE,
    PLUGIN_VERSION,
    inter_block_name,
)

_FLOATS: Final = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
_PLUGIN: Final = {"plugin_namespace": DOMAIN, "plugin_version": PLUGIN_VERSION}


def translation_table(opset: int) -> dict[Callable[..., Any], Callable[..., Any]]:
    """What ``torch.onnx.export`` takes as ``custom_translation_table`` for the operators.

    Args:
        opset: version of the standard operator set that the graph uses.
    """
    standard = Opset("", opset)

    def weight(key_norm: Any, query: Any) -> Any:
        """``key_norm``, or ones like ``query``: every input of a custom node is given."""
        if key_norm is not None:
            return key_norm
        ones = np.ones([int(size) for size in query.shape], dtype=query.dtype.numpy())
        return standard.Constant(value=ir.tensor(ones, dtype=query.dtype))

    def depth_attention(sources: Sequence[Any], query: Any, key_norm: Any, eps: float, scale: float) -> Any:
        node = _node(f"{DEPTH_ATTENTION}{len(sources)}", [("query", "Q"), ("key_norm", "G")], "v", len(sources))
        return node(query, weight(key_norm, query), *sources, eps=eps, scale=scale, **_PLUGIN)

    # The separate reads of a first phase by its stacked results, and what stands for a sum of exponentials of 1.
    parts: dict[Any, list[Any]] = {}
    ones: set[Any] = set()

    def inter_block(blocks: Sequence[Any], queries: Any, key_norms: Any, eps: float) -> Any:
        """``o`` and ``m`` as the mean and the logarithm of the sum: the same state for ``l = 1``."""
        reads = int(queries.shape[0])
        outputs = [f"{name}{i}" for name in "oz" for i in range(reads)]
        inputs = [("queries", "Q"), ("key_norms", "G")]
        node = _node(inter_block_name(len(blocks), reads), inputs, "b", len(blocks), outputs, "F")
        results = node(queries, weight(key_norms, queries), *blocks, eps=eps, **_PLUGIN)
        os, zs = list(results[:reads]), list(results[reads:])
        one = standard.Expand(standard.Constant(value_float=1.0), standard.Shape(zs[0]))
        ones.add(one)
        # For whoever does not take it apart; dropped where nobody does.
        o, m, l = stacked = [standard.Concat(*_rows(standard, rows), axis=0) for rows in (os, zs, [one] * reads)]
        parts.update(zip(stacked, (os, zs, [one] * reads), strict=True))
        return o, m, l

    def unbind(value: Any, dim: int = 0) -> Any:
        return parts[value] if value in parts and dim == 0 else aten_unbind(value, dim)

    def merge(o: Any, m: Any, l: Any, partial: Any, query: Any, key_norm: Any, eps: float, scale: float) -> Any:
        if l not in ones:
            o = standard.Div(o, standard.Unsqueeze(l, standard.Constant(value_ints=[-1])))
            m = standard.Add(m, standard.Log(l))
        if partial is None:
            return standard.Mul(o, standard.Constant(value_float=scale))
        node = _node(MERGE, [("o", "F"), ("z", "F"), ("partial", "T"), ("query", "Q"), ("key_norm", "G")])
        return node(o, m, partial, query, weight(key_norm, query), eps=eps, scale=scale, **_PLUGIN)

    ops = torch.ops.attnres_compile
    return {
        ops.depth_attention.default: depth_attention,
        ops.inter_block.default: inter_block,
        ops.merge.default: merge,
        torch.ops.aten.unbind.int: unbind,
    }


def _rows(standard: Opset, values: Sequence[Any]) -> list[Any]:
    return [standard.Unsqueeze(value, standard.Constant(value_ints=[0])) for value in values]


def _node(
    name: str,
    inputs: Sequence[tuple[str, str]],
    source: str = "",
    sources: int = 0,
    outputs: Sequence[str] = ("h",),
    output_type: str = "T",
) -> Op:
    """A custom node's constructor: ``inputs`` by name and type, then ``sources`` inputs of one type ``T``."""
    # One input a source: with a variadic formal, torch.onnx repeats the inputs before it.
    formals = [*inputs, *((f"{source}{i}", "T") for i in range(sources))]
    attributes = [
        *(OpSchema.Attribute(name, OpSchema.AttrType.FLOAT, "", required=False) for name in ("eps", "scale")),
        *(OpSchema.Attribute(name, OpSchema.AttrType.STRING, "", required=False) for name in _PLUGIN),
    ]
    schema = OpSchema(
        name,
        DOMAIN,
        1,
        inputs=[OpSchema.FormalParameter(*formal) for formal in formals],
        outputs=[OpSchema.FormalParameter(output, output_type) for output in outputs],
        type_constraints=[
            (variable, ["tensor(float)"] if variable == "F" else _FLOATS, "")
            for variable in sorted({kind for _, kind in formals} | {output_type})
        ],
        attributes=attributes,
    )
    return Op(Opset(DOMAIN, 1), name, schema)
