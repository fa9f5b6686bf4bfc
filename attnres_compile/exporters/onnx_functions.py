"""The depth-attention operators as ONNX model-local functions: bodies in standard operators that any runtime inlines.

Importing this module needs ``onnx``. Three rules hold for every body, since runtimes break on their violation:

- A function's name carries its number of sources, and every input is given: TensorRT's parser looks functions up by
  name alone, and plugins have fixed signatures.
- Formals and internals carry a prefix of their own: a formal named like a tensor of the calling graph would be bound
  to that tensor by TensorRT's parser.
- The softmax over depth is unrolled into Max, Exp and Sum over separate sources, without Concat or a stacked tensor:
  in this form a compiler fuses a whole read into one kernel.
"""

from __future__ import annotations

from typing import Any, Final

from onnx import AttributeProto, FunctionProto, TensorProto, helper

DOMAIN: Final = "attnres_compile"
PLUGIN_VERSION: Final = "1"

DEPTH_ATTENTION: Final = "DepthAttentionN"
INTER_BLOCK: Final = "InterBlockN"
MERGE: Final = "Merge"
MERGE_FIRST: Final = "MergeFirst"

_DEFAULTS: Final = {"eps": 1e-6, "scale": 1.0}


def function_proto(name: str, opset: int) -> FunctionProto:
    """The model-local function behind a custom node.

    Computes in fp32; the last node casts to the sources' dtype.

    Args:
        name: the node's type, e.g. ``DepthAttentionN5``, ``InterBlockN3``, ``Merge`` or ``MergeFirst``.
        opset: version of the standard operator set that the body uses; 18 is the least.

    Returns:
        A function of domain ``attnres_compile`` with ``eps`` and ``scale``, where it uses them, as attributes with
        defaults, and ``plugin_namespace`` and ``plugin_version`` for runtimes that replace the node by a plugin.

    Raises:
        ValueError: no operator has that name.
    """
    if name == MERGE:
        return _merge(opset)
    if name == MERGE_FIRST:
        return _merge_first(opset)
    for kind, build in ((DEPTH_ATTENTION, _depth_attention), (INTER_BLOCK, _inter_block)):
        count = name.removeprefix(kind)
        if count != name and count.isdecimal() and int(count) > 0:
            return build(int(count), opset)
    raise ValueError(f"no function of domain {DOMAIN} is called {name!r}")


class _Body:
    """Collects a function's nodes; every value name starts with the function's own prefix."""

    def __init__(self, name: str, opset: int) -> None:
        self.name, self.opset = name, opset
        self.nodes: list[Any] = []
        self.formals: list[str] = []
        self.attributes: list[str] = []

    def prefixed(self, name: str) -> str:
        return f"{DOMAIN}_{self.name}_{name}"

    def inputs(self, *names: str) -> list[str]:
        self.formals = [self.prefixed(name) for name in names]
        return self.formals

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        output = self.prefixed(f"{kind.lower()}_{len(self.nodes)}")
        self.nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def attribute(self, name: str) -> str:
        """A scalar that holds the function's attribute ``name``."""
        output = self.op("Constant")
        self.nodes[-1].attribute.append(
            AttributeProto(name="value_float", ref_attr_name=name, type=AttributeProto.FLOAT)
        )
        self.attributes.append(name)
        return output

    def ints(self, *values: int) -> str:
        return self.op("Constant", value_ints=list(values))

    def float(self, value: str) -> str:
        return self.op("Cast", value, to=TensorProto.FLOAT)

    def key(self, query: str, key_norm: str) -> str:
        """``key_norm * query``: only this product reaches the logits."""
        return self.op("Mul", self.float(query), self.float(key_norm))

    def rms(self, x: str, eps: str, axis: str, *, keepdims: int) -> str:
        mean = self.op("ReduceMean", self.op("Mul", x, x), axis, keepdims=keepdims)
        return self.op("Sqrt", self.op("Add", mean, eps))

    def logit(self, x: str, key: str, eps: str, last: str) -> str:
        """``<x, key> / rms(x)``, ``[..., 1]``."""
        dot = self.op("ReduceSum", self.op("Mul", x, key), last, keepdims=1)
        return self.op("Div", dot, self.rms(x, eps, last, keepdims=1))

    def exponentials(self, logits: list[str]) -> tuple[str, list[str]]:
        largest = self.op("Max", *logits)
        return largest, [self.op("Exp", self.op("Sub", logit, largest)) for logit in logits]

    def function(self, **outputs: str) -> FunctionProto:
        """The function whose outputs are these values, none of them used inside, under these names."""
        names = {value: self.prefixed(name) for name, value in outputs.items()}
        for node in self.nodes:
            node.output[0] = names.get(node.output[0], node.output[0])
        return helper.make_function(
            DOMAIN,
            self.name,
            self.formals,
            list(names.values()),
            self.nodes,
            [helper.make_opsetid("", self.opset)],
            attributes=["plugin_namespace", "plugin_version"],
            attribute_protos=[helper.make_attribute(name, _DEFAULTS[name]) for name in self.attributes],
        )


def _depth_attention(n: int, opset: int) -> FunctionProto:
    body = _Body(f"{DEPTH_ATTENTION}{n}", opset)
    query, key_norm, *sources = body.inputs("query", "key_norm", *(f"v{i}" for i in range(n)))
    eps, scale, last, key = body.attribute("eps"), body.attribute("scale"), body.ints(-1), body.key(query, key_norm)
    xs = [body.float(source) for source in sources]
    _, weights = body.exponentials([body.logit(x, key, eps, last) for x in xs])
    mixed = body.op("Sum", *(body.op("Mul", weight, x) for weight, x in zip(weights, xs, strict=True)))
    h = body.op("Mul", body.op("Div", mixed, body.op("Sum", *weights)), scale)
    return body.function(h=body.op("CastLike", h, sources[0]))


def _inter_block(n: int, opset: int) -> FunctionProto:
    """Flattens the tokens to ``[T, d]``, so that the body knows neither their rank nor the number S of reads."""
    body = _Body(f"{INTER_BLOCK}{n}", opset)
    queries, key_norms, *blocks = body.inputs("queries", "key_norms", *(f"b{i}" for i in range(n)))
    eps, one, two, keys = body.attribute("eps"), body.ints(1), body.ints(2), body.key(queries, key_norms)
    xs = [body.op("Flatten", body.float(block), axis=-1) for block in blocks]
    dots = [body.op("Gemm", keys, x, transB=1) for x in xs]
    rms = [body.rms(x, eps, one, keepdims=0) for x in xs]
    m, weights = body.exponentials([body.op("Div", dot, r) for dot, r in zip(dots, rms, strict=True)])
    weighted = [body.op("Mul", body.op("Unsqueeze", e, two), x) for e, x in zip(weights, xs, strict=True)]
    reads = body.op("Shape", queries, start=0, end=1)
    shape = body.op("Concat", reads, body.op("Shape", blocks[0]), axis=0)
    tokens = body.op("Concat", reads, body.op("Shape", blocks[0], start=0, end=-1), axis=0)

    def unflatten(value: str, to: str) -> str:
        return body.op("Reshape", value, to, allowzero=1)  # zero tokens stay zero tokens

    return body.function(
        o=unflatten(body.op("Sum", *weighted), shape),
        m=unflatten(m, tokens),
        l=unflatten(body.op("Sum", *weights), tokens),
    )


def _merge(opset: int) -> FunctionProto:
    body = _Body(MERGE, opset)
    o, m, l, partial, query, key_norm = body.inputs("o", "m", "l", "partial", "query", "key_norm")
    eps, scale, last, key = body.attribute("eps"), body.attribute("scale"), body.ints(-1), body.key(query, key_norm)
    x = body.float(partial)
    _, (of_blocks, of_partial) = body.exponentials([body.op("Unsqueeze", m, last), body.logit(x, key, eps, last)])
    total = body.op("Add", body.op("Mul", of_blocks, body.op("Unsqueeze", l, last)), of_partial)
    mixed = body.op("Add", body.op("Mul", of_blocks, o), body.op("Mul", of_partial, x))
    h = body.op("Mul", body.op("Div", mixed, total), scale)
    return body.function(h=body.op("CastLike", h, partial))


def _merge_first(opset: int) -> FunctionProto:
    body = _Body(MERGE_FIRST, opset)
    o, l = body.inputs("o", "l")
    mixed = body.op("Div", o, body.op("Unsqueeze", l, body.ints(-1)))
    return body.function(h=body.op("Mul", mixed, body.attribute("scale")))
