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

from attnres_compile.exporters.node_types import (
    DOMAIN,
    MERGE,
    PLUGIN_VERSION,
    depth_attention_name,
    inter_block_name,
    merge_norm_name,
)

_FLOATS: Final = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
_NUMBERS: Final = ("eps", "norm_eps", "scale")
_PLUGIN: Final = {"plugin_namespace": DOMAIN, "plugin_version": PLUGIN_VERSION}


def translation_table(opset: int) -> dict[Callable[..., Any], Callable[..., Any]]:
    """What ``torch.onnx.export`` takes as ``custom_translation_table`` for the operators.

    Args:
        opset: version of the standard operator set that the graph uses.
    """
    standard = Opset("", opset)

    def weight(given: Any, query: Any, otherwise: float = 1) -> Any:
        """A vector, or ones (or zeros) like ``query``: every input of a custom node is given."""
        if given is not None:
            return given
        values = np.full([int(size) for size in query.shape], otherwise, dtype=query.dtype.numpy())
        return standard.Constant(value=ir.tensor(values, dtype=query.dtype))

    def depth_attention(sources: Sequence[Any], query: Any, key_norm: Any, eps: float, scale: float) -> Any:
        node = _node(depth_attention_name(len(sources)), [("query", "Q"), ("key_norm", "G")], "v", len(sources))
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
        o, z = state(o, m, l)
        if partial is None:
            return standard.Mul(o, standard.Constant(value_float=scale))
        node = _node(MERGE, [("o", "F"), ("z", "F"), ("partial", "T"), ("query", "Q"), ("key_norm", "G")])
        return node(o, z, partial, query, weight(key_norm, query), eps=eps, scale=scale, **_PLUGIN)

    def state(o: Any, m: Any, l: Any) -> tuple[Any, Any]:
        """Mean and logarithm of the sum of exponentials, from the largest logit ``m`` and the sum ``l``."""
        if l in ones:
            return o, m
        mean = standard.Div(o, standard.Unsqueeze(l, standard.Constant(value_ints=[-1])))
        return mean, standard.Add(m, standard.Log(l))

    def fused(
        streams: dict[str, Any], phase: tuple[Any, Any, Any], vectors: tuple[Any, ...], options: tuple[Any, ...]
    ) -> Any:
        """A read with its norm; with two streams, the residual add too."""
        query, key_norm, scaling, shift = vectors
        eps, norm_eps, scale, norm = options
        name = merge_norm_name(norm, add=len(streams) > 1)
        formals = [("o", "F"), ("z", "F"), *((stream, "T") for stream in streams)]
        formals += [("query", "Q"), ("key_norm", "G"), ("weight", "W"), ("bias", "B")]
        node = _node(name, formals, outputs=("h",) if len(streams) == 1 else ("total", "h"))
        given = (query, weight(key_norm, query), weight(scaling, query), weight(shift, query, 0))
        numbers = {"eps": eps, "norm_eps": norm_eps, "scale": scale}
        return node(*state(*phase), *streams.values(), *given, **numbers, **_PLUGIN)

    def add_merge_norm(partial: Any, branch: Any, blocks: Any, o: Any, m: Any, l: Any, *others: Any) -> Any:
        return fused({"partial": partial, "branch": branch}, (o, m, l), others[:4], others[4:])

    def merge_norm(blocks: Any, o: Any, m: Any, l: Any, partial: Any, *others: Any) -> Any:
        vectors, options = others[:4], others[4:]
        if partial is not None:
            return fused({"partial": partial}, (o, m, l), vectors, options)
        (_, _, scaling, shift), (_, norm_eps, scale, norm) = vectors, options
        h = standard.Mul(state(o, m, l)[0], standard.Constant(value_float=scale))
        return standard.CastLike(normalised(h, scaling, shift, norm_eps, norm), blocks[0])

    def normalised(h: Any, scaling: Any, shift: Any, eps: float, norm: str) -> Any:
        """The norm of fp32 rows, in fp32."""
        last = standard.Constant(value_ints=[-1])
        if norm == "layer":
            h = standard.Sub(h, standard.ReduceMean(h, last, keepdims=1))
        mean = standard.ReduceMean(standard.Mul(h, h), last, keepdims=1)
        h = standard.Div(h, standard.Sqrt(standard.Add(mean, standard.Constant(value_float=eps))))
        h = h if scaling is None else standard.Mul(h, standard.CastLike(scaling, h))
        return h if shift is None else standard.Add(h, standard.CastLike(shift, h))

    ops = torch.ops.attnres_compile
    return {
        ops.depth_attention.default: depth_attention,
        ops.inter_block.default: inter_block,
        ops.merge.default: merge,
        ops.merge_norm.default: merge_norm,
        ops.add_merge_norm.default: add_merge_norm,
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
        *(OpSchema.Attribute(name, OpSchema.AttrType.FLOAT, "", required=False) for name in _NUMBERS),
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
