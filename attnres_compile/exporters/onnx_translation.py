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
from onnxscript.values import Op, Opset

from attnres_compile.exporters.onnx_functions import (
    DEPTH_ATTENTION,
    DOMAIN,
    INTER_BLOCK,
    MERGE,
    MERGE_FIRST,
    PLUGIN_VERSION,
)

_FLOATS: Final = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
_PLUGIN: Final = {"plugin_namespace": DOMAIN, "plugin_version": PLUGIN_VERSION}


def translation_table(opset: int) -> dict[Callable[..., Any], Callable[..., Any]]:
    """What ``torch.onnx.export`` takes as ``custom_translation_table`` for the three operators.

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

    def inter_block(blocks: Sequence[Any], queries: Any, key_norms: Any, eps: float) -> Any:
        inputs, outputs = [("queries", "Q"), ("key_norms", "G")], ("o", "m", "l")
        node = _node(f"{INTER_BLOCK}{len(blocks)}", inputs, "b", len(blocks), outputs, "F")
        return node(queries, weight(key_norms, queries), *blocks, eps=eps, **_PLUGIN)

    def merge(o: Any, m: Any, l: Any, partial: Any, query: Any, key_norm: Any, eps: float, scale: float) -> Any:
        if partial is None:
            return _node(MERGE_FIRST, [("o", "F"), ("l", "F")], output_type="F")(o, l, scale=scale, **_PLUGIN)
        inputs = [("o", "F"), ("m", "F"), ("l", "F"), ("partial", "T"), ("query", "Q"), ("key_norm", "G")]
        node = _node(MERGE, inputs)
        return node(o, m, l, partial, query, weight(key_norm, query), eps=eps, scale=scale, **_PLUGIN)

    ops = torch.ops.attnres_compile
    return {
        ops.depth_attention.default: depth_attention,
        ops.inter_block.default: inter_block,
        ops.merge.default: merge,
    }


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
