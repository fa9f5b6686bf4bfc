"""The depth-attention operators as ONNX model-local functions: bodies in standard operators that any runtime inlines.

Importing this module needs ``onnx``. Two rules hold for every body, since runtimes break on their violation:

- A function is found by its name alone (``node_types``), and every input is given.
- Formals and internals carry a prefix of their own: a formal named like a tensor of the calling graph would be bound
  to that tensor by TensorRT's parser.

A body has one of four forms, which differ in what a runtime makes of them (docs/onnx.md has the figures):

- ``unrolled``: Max, Exp and Sum over separate sources, without Concat or a stacked tensor: a compiler fuses a whole
  read into one kernel.
- ``tied``: the same, and what is mixed is multiplied by 1, made of the read's own weights. A compiler knows neither its
  value nor a way to have it earlier. Without it, TensorRT keeps the cast of a source to fp32, common to all reads, in
  memory in place of the source, and every read's kernel falls apart at it.
- ``matmul``: all logits of a block by one MatMul over the stacked sources, and all weighted sums by another; the
  partial sum's logit by RMSNormalization. Fewest passes over memory for a runtime that runs node by node.
- ``stacked``: the equations as they are written, over a stack of the sources.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, get_args

from onnx import AttributeProto, FunctionProto, TensorProto, helper

from attnres_compile.exporters.node_types import DEPTH_ATTENTION, DOMAIN, INTER_BLOCK, node_type

# In the names of the unrolled nodes that weigh and sum the sources, by which a kernel is known as the one that mixes.
MIX: Final = "mix"

Form = Literal["unrolled", "tied", "stacked", "matmul"]
FORMS: Final[tuple[Form, ...]] = get_args(Form)

_DEFAULTS: Final = {"eps": 1e-6, "norm_eps": 1e-6, "scale": 1.0}
# The version of the standard operator set that brought RMSNormalization.
_RMS_NORMALIZATION: Final = 23


def function_proto(name: str, opset: int, form: Form = "matmul") -> FunctionProto:
    """The model-local function behind a custom node.

    - ``DepthAttentionN<n>(query, key_norm, v0, ...) -> h``: one read of n sources ``[..., d]``.
    - ``InterBlockN<n>S<s>(queries, key_norms, b0, ...) -> o0, ..., z0, ...``: phase 1. For each of s reads, in fp32,
      the softmax-weighted mean ``o [..., d]`` of the blocks, and ``z [...]``, the logarithm of its sum of exponentials.
    - ``Merge(o, z, partial, query, key_norm) -> h``: phase 2, with ``g = sigmoid(logit(partial) - z)``:
      ``h = scale * ((1 - g) o + g partial)``, which is the softmax over the blocks and the partial sum.
    - ``MergeRMSNorm(o, z, partial, query, key_norm, weight, bias) -> h``, ``MergeLayerNorm``: phase 2 and the norm of
      its result. ``AddMergeRMSNorm(o, z, partial, branch, query, ...) -> total, h``, ``AddMergeLayerNorm``: the
      residual add before it too; what is merged is the rounded ``total = partial + branch``.

    Computes in fp32; the last node casts to the sources' dtype.

    Args:
        name: the node's type, e.g. ``DepthAttentionN5``, ``InterBlockN3S4``, ``Merge`` or ``AddMergeRMSNorm``.
        opset: version of the standard operator set that the body uses; 18 is the least.
        form: of the body.

    Returns:
        A function of domain ``attnres_compile`` with ``eps``, ``norm_eps`` and ``scale``, where it uses them, as
        attributes with defaults, and ``plugin_namespace`` and ``plugin_version`` for runtimes that replace the node by
        a plugin.

    Raises:
        ValueError: no operator has that name.
    """
    body, kind = _Body(name, opset, form), node_type(name)
    if kind is None:
        raise ValueError(f"no function of domain {DOMAIN} is called {name!r}")
    if kind.operator == DEPTH_ATTENTION:
        return _depth_attention(body, kind.sources)
    if kind.operator == INTER_BLOCK:
        return _inter_block(body, kind.sources, kind.reads)
    if kind.norm is None:
        return _merge(body)
    return _merge_norm(body, add=kind.add, centred=kind.norm == "layer")


class _Body:
    """Collects a function's nodes; every value name starts with the function's own prefix."""

    def __init__(self, name: str, opset: int, form: Form) -> None:
        self.name, self.opset, self.form = name, opset, form
        self.nodes: list[Any] = []
        self.formals: list[str] = []
        self.attributes: set[str] = set()
        self.scalars: dict[str, str] = {}
        self.last = self.ints(-1)

    def prefixed(self, name: str) -> str:
        return f"{DOMAIN}_{self.name}_{name}"

    def inputs(self, *names: str) -> list[str]:
        self.formals = [self.prefixed(name) for name in names]
        return self.formals

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.ops(1, kind, *inputs, **attributes)[0]

    def mix(self, kind: str, *inputs: str) -> str:
        """A node that weighs or sums sources."""
        return self.op(kind, *inputs, part=MIX)

    def ops(self, count: int, kind: str, *inputs: str, part: str = "", **attributes: Any) -> list[str]:
        """A node with several outputs."""
        first = self.prefixed(f"{part or kind.lower()}_{len(self.nodes)}")
        outputs = [first, *(f"{first}_{i}" for i in range(1, count))]
        self.nodes.append(helper.make_node(kind, list(inputs), outputs, first, **attributes))
        return outputs

    def attribute(self, name: str) -> str:
        """A scalar that holds the function's attribute ``name``."""
        if name not in self.scalars:
            self.scalars[name] = self.op("Constant")
            self.refer("value_float", name)
        return self.scalars[name]

    def refer(self, attribute: str, name: str) -> None:
        """Let an attribute of the last node be the function's attribute ``name``."""
        reference = AttributeProto(name=attribute, ref_attr_name=name, type=AttributeProto.FLOAT)
        self.nodes[-1].attribute.append(reference)
        self.attributes.add(name)

    def ints(self, *values: int) -> str:
        return self.op("Constant", value_ints=list(values))

    def float(self, value: str) -> str:
        return self.op("Cast", value, to=TensorProto.FLOAT)

    def key(self, query: str, key_norm: str) -> str:
        """``key_norm * query``: only this product reaches the logits."""
        return self.op("Mul", self.float(query), self.float(key_norm))

    def rms(self, x: str, eps: str = "eps") -> str:
        mean = self.op("ReduceMean", self.op("Mul", x, x), self.last, keepdims=1)
        return self.op("Sqrt", self.op("Add", mean, self.attribute(eps)))

    def logit(self, x: str, key: str) -> str:
        """``<x, key> / rms(x)``, ``[..., 1]``."""
        if self.form == "matmul" and self.opset >= _RMS_NORMALIZATION:
            normalised = self.op("RMSNormalization", x, key, axis=-1)
            self.refer("epsilon", "eps")
            return self.op("ReduceSum", normalised, self.last, keepdims=1)
        dot = self.op("ReduceSum", self.op("Mul", x, key), self.last, keepdims=1)
        return self.op("Div", dot, self.rms(x))

    def gated(self, o: str, z: str, x: str, key: str) -> str:
        """``scale * ((1 - g) o + g x)`` with ``g = sigmoid(logit(x) - z)``, ``z [..., 1]``."""
        scale = self.attribute("scale")
        gate = self.op("Mul", self.op("Sigmoid", self.op("Sub", self.logit(x, key), z)), scale)
        # Not Add: ONNX Runtime fuses an Add and the norm after it to an operator that is far slower than both.
        return self.op("Sum", self.op("Mul", self.op("Sub", scale, gate), o), self.op("Mul", gate, x))

    def function(self, **outputs: str) -> FunctionProto:
        """The function whose outputs are these values, none of them used inside, under these names."""
        names = {value: self.prefixed(name) for name, value in outputs.items()}
        for node in self.nodes:
            node.output[:] = [names.get(output, output) for output in node.output]
        return helper.make_function(
            DOMAIN,
            self.name,
            self.formals,
            list(names.values()),
            self.nodes,
            [helper.make_opsetid("", self.opset)],
            attributes=["plugin_namespace", "plugin_version"],
            attribute_protos=[helper.make_attribute(name, _DEFAULTS[name]) for name in sorted(self.attributes)],
        )


def _depth_attention(body: _Body, n: int) -> FunctionProto:
    query, key_norm, *sources = body.inputs("query", "key_norm", *(f"v{i}" for i in range(n)))
    key = body.key(query, key_norm)
    if n == 2 and body.form == "matmul":
        x, last = map(body.float, sources)
        h = body.gated(x, body.logit(x, key), last, key)
    else:
        ((o, _),) = _MIXES[body.form](body, sources, body.op("Unsqueeze", key, body.ints(0)), 1)
        h = body.mix("Mul", o, body.attribute("scale"))
    return body.function(h=body.op("CastLike", h, sources[0]))


def _inter_block(body: _Body, n: int, reads: int) -> FunctionProto:
    queries, key_norms, *blocks = body.inputs("queries", "key_norms", *(f"b{i}" for i in range(n)))
    mixed = _MIXES[body.form](body, blocks, body.key(queries, key_norms), reads)
    os = {f"o{i}": o for i, (o, _) in enumerate(mixed)}
    return body.function(**os, **{f"z{i}": body.op("Squeeze", z, body.last) for i, (_, z) in enumerate(mixed)})


def _merge(body: _Body) -> FunctionProto:
    o, z, partial, query, key_norm = body.inputs("o", "z", "partial", "query", "key_norm")
    key, x = body.key(query, key_norm), body.float(partial)
    return body.function(h=body.op("CastLike", body.gated(o, body.op("Unsqueeze", z, body.last), x, key), partial))


def _merge_norm(body: _Body, *, add: bool, centred: bool) -> FunctionProto:
    terms, vectors = ("partial", "branch") if add else ("partial",), ("query", "key_norm", "weight", "bias")
    o, z, *streams, query, key_norm, weight, bias = body.inputs("o", "z", *terms, *vectors)
    total = body.op("Add", *streams) if add else streams[0]
    h = body.gated(o, body.op("Unsqueeze", z, body.last), body.float(total), body.key(query, key_norm))
    if centred:
        h = body.op("Sub", h, body.op("ReduceMean", h, body.last, keepdims=1))
    h = body.op("Mul", body.op("Div", h, body.rms(h, "norm_eps")), body.float(weight))
    h = body.op("CastLike", body.op("Add", h, body.float(bias)), streams[0])
    return body.function(**({"total": body.op("Identity", total)} if add else {}), h=h)


# From sources ``[..., d]`` of any dtype and keys ``[S, d]`` to ``o [..., d]`` and ``z [..., 1]`` of each read.
_Mixed = list[tuple[str, str]]


def _rows(body: _Body, keys: str, reads: int) -> list[str]:
    zero = body.ints(0)
    rows = [keys] if reads == 1 else body.ops(reads, "Split", keys, axis=0, num_outputs=reads)
    return [body.op("Squeeze", row, zero) for row in rows]


def _unrolled(body: _Body, sources: list[str], keys: str, reads: int) -> _Mixed:
    xs = [body.float(source) for source in sources]
    roots, mixed = [body.rms(x) for x in xs], []
    for key in _rows(body, keys, reads):
        dots = [body.op("ReduceSum", body.op("Mul", x, key), body.last, keepdims=1) for x in xs]
        logits = [body.op("Div", dot, root) for dot, root in zip(dots, roots, strict=True)]
        largest = body.op("Max", *logits)
        weights = [body.op("Exp", body.op("Sub", logit, largest)) for logit in logits]
        total = body.op("Sum", *weights)
        values = xs
        if body.form == "tied":
            # The largest weight is exp(0) = 1, so that their sum is at least 1.
            one = body.op("CastLike", body.op("Min", total, body.op("Constant", value_float=1.0)), sources[0])
            values = [body.float(body.op("Mul", source, one)) for source in sources]
        weighted = body.mix("Sum", *(body.mix("Mul", weight, x) for weight, x in zip(weights, values, strict=True)))
        mixed.append((body.mix("Div", weighted, total), body.op("Add", largest, body.op("Log", total))))
    return mixed


def _stacked(body: _Body, sources: list[str], keys: str, reads: int) -> _Mixed:
    xs, first, mixed = [body.float(source) for source in sources], body.ints(0), []
    stack = body.op("Concat", *(body.op("Unsqueeze", x, first) for x in xs), axis=0)
    root = body.rms(stack)
    for key in _rows(body, keys, reads):
        logits = body.op("Div", body.op("ReduceSum", body.op("Mul", stack, key), body.last, keepdims=1), root)
        weighted = body.op("Mul", body.op("Softmax", logits, axis=0), stack)
        z = body.op("ReduceLogSumExp", logits, first, keepdims=0)
        mixed.append((body.op("ReduceSum", weighted, first, keepdims=0), z))
    return mixed


def _matmul(body: _Body, sources: list[str], keys: str, reads: int) -> _Mixed:
    xs = [body.float(source) for source in sources]
    one, leading = body.ints(1), body.op("Shape", xs[0], start=0, end=-1)
    shapes = body.op("Shape", xs[0]), body.op("Concat", leading, one, axis=0)
    stack = body.op("Concat", *(body.op("Unsqueeze", body.op("Flatten", x, axis=-1), one) for x in xs), axis=1)
    dots = body.op("MatMul", stack, body.op("Transpose", keys, perm=[1, 0]))
    # [T, n, S] to [T, S, n]: a softmax over the last axis, and weights that multiply the stack.
    logits = body.op("Transpose", body.op("Div", dots, body.rms(stack)), perm=[0, 2, 1])
    o = body.op("MatMul", body.op("Softmax", logits, axis=-1), stack)
    z = body.op("ReduceLogSumExp", logits, body.last, keepdims=1)

    def by_read(value: str, shape: str) -> list[str]:
        rows = [value] if reads == 1 else body.ops(reads, "Split", value, axis=1, num_outputs=reads)
        # Zero tokens stay zero tokens.
        return [body.op("Reshape", row, shape, allowzero=1) for row in rows]

    return list(zip(*(by_read(value, shape) for value, shape in zip((o, z), shapes, strict=True)), strict=True))


_MIXES: Final[dict[Form, Callable[[_Body, list[str], str, int], _Mixed]]] = {
    "unrolled": _unrolled,
    "tied": _unrolled,
    "stacked": _stacked,
    "matmul": _matmul,
}
