"""Lower reads of few tokens to PyTorch's own operators, which the compiler fuses with what is around them.

Before::

    %h = merge(%o, %m, %l, %p, %q, %k, eps, 3.0)

After::

    %norm = linalg_vector_norm(%p, 2, [-1])    %z = sum(mul(%p, mul(%q, %k)), [-1])
    ...                                        %h = addcmul(mul(%o, %a), %p, %b)

Few, because one call of a kernel costs more than what it computes then; with many tokens the kernel passes over memory
once where generated code would pass several times. Assumes a functional graph of ATen operators, as it is after
autograd, and that an operator's implementation is traceable on fake tensors. Leaves the other reads as they are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from attnres_compile.ops._library import IMPLEMENTATIONS
from attnres_compile.passes import _nodes
from attnres_compile.passes._emit import PLACE, STAMP
from attnres_compile.passes.base import Subject

NAME = "lower_factored"
Known = dict[tuple[Any, str], fx.Node]
Decompositions = Mapping[torch._ops.OpOverload, Callable[..., Any]]


@dataclass(frozen=True)
class LowerFactored:
    """Pass: see the module's text.

    Attributes:
        tokens: lower what has at most so many.
        decompositions: of PyTorch's operators, as the compiler behind wants them.
    """

    tokens: float = math.inf
    decompositions: Decompositions | None = field(default=None, repr=False)

    def __call__(self, subject: Subject) -> bool:
        """Lower every operator that is small enough."""
        found = [node for node in subject.module.graph.nodes if node.target in IMPLEMENTATIONS]
        small = [node for node in found if _tokens(node) <= self.tokens]
        known: Known = {}
        for node in small:
            _lower(node, self.decompositions, known)
        if small:
            subject.edited = True
        return bool(small)


def _tokens(node: fx.Node) -> float:
    """Rows of features that the operator goes over: the largest product of leading sizes among its results."""
    values = [v for v in pytree.tree_leaves(node.meta["val"]) if isinstance(v, Tensor) and v.ndim]
    leading = [_nodes.hints(v.shape[:-1]) for v in values]
    # What data decide may be many.
    return max(math.prod(n if isinstance(n, int) else math.inf for n in sizes) for sizes in leading)


def _lower(node: fx.Node, decompositions: Decompositions | None, known: Known) -> None:
    assert isinstance(node.target, torch._ops.OpOverload)
    implementation = IMPLEMENTATIONS[node.target]
    leaves, structure = pytree.tree_flatten(node.args)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]

    def function(*tensors: Tensor) -> Any:
        given = list(leaves)
        for i, tensor in zip(at, tensors, strict=True):
            given[i] = tensor
        return implementation(*pytree.tree_unflatten(given, structure))

    operands = [leaves[i] for i in at]
    values = [operand.meta["val"] for operand in operands]
    traced = make_fx(function, dict(decompositions or {}), tracing_mode="symbolic")(*values)
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    copies = dict(zip(placeholders, operands, strict=True))
    with node.graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            # Every first phase needs the norms of the blocks that the one before it had.
            key = inner.target, repr(fx.node.map_arg((inner.args, inner.kwargs), lambda n: copies[n]))
            if key in known:
                copies[inner] = known[key]
                continue
            copies[inner] = known[key] = copy = node.graph.node_copy(inner, lambda n: copies[n])
            copy.meta = {key: node.meta[key] for key in PLACE if key in node.meta} | {STAMP: NAME}
            copy.meta["val"] = inner.meta["val"]
    result = fx.node.map_arg(traced.graph.output_node().args[0], lambda n: copies[n])
    _use(node, result)


def _use(node: fx.Node, result: Any) -> None:
    """Hand the users of an operator its results, which they pick by index."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            assert user.target is operator.getitem
            _use(user, result[user.args[1]])
    node.graph.erase_node(node)
