"""Multiply a finished block by the keys of all its later reads at once.

Before::

    %z1 = mm(%b, permute(mul(slice(%query, 0, 2, 5), slice(%key_norm, 0, 2, 5))))
    ...
    %z2 = mm(%b, permute(mul(slice(%query, 0, 5, 8), slice(%key_norm, 0, 5, 8))))

After::

    %z = mm(%b, cat([permute(...), permute(...)], 1))
    %z1 = slice(%z, 1, 0, 3)
    ...
    %z2 = slice(%z, 1, 3, 6)

Keys depend on no token, so they are there when the block is. A product with the few keys of one block takes as long as
one with all: what costs is to go over the source. Assumes a graph that ``LowerFactored`` has lowered; other products
stay.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attnres_compile.passes import lower_factored
from attnres_compile.passes._emit import STAMP, emit, replace
from attnres_compile.passes.base import Subject

aten = torch.ops.aten

NAME = "join_products"


@dataclass(frozen=True)
class JoinProducts:
    """Pass: see the module's text."""

    def __call__(self, subject: Subject) -> bool:
        """Join the products of every source."""
        # Sources come in the order of their first products.
        order = {node: i for i, node in enumerate(subject.module.graph.nodes)}
        of_source: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in subject.module.graph.find_nodes(op="call_function", target=aten.mm.default):
            if node.meta.get(STAMP) == lower_factored.NAME:
                of_source[node.args[0]].append(node)
        modified = sum(_join(products, order) for products in of_source.values()) > 0
        if modified:
            subject.edited = True
        return modified


def _join(products: list[fx.Node], order: dict[fx.Node, int]) -> bool:
    first = products[0]
    key_of: dict[fx.Node, Any] = {product: product.args[1] for product in products}
    later = {product: _after(first, key, order) for product, key in key_of.items()}
    joined = [product for product in products if first not in later[product]]
    if len(joined) < 2:
        return False
    for node in sorted(set().union(*(later[product] for product in joined)), key=order.__getitem__):
        first.prepend(node)
        order[node] = order[first]  # before the first product of any source to come
    keys = emit(NAME, first, aten.cat.default, [key_of[product] for product in joined], 1)
    every = emit(NAME, first, aten.mm.default, first.args[0], keys)
    start = 0
    for product in joined:
        stop = start + product.meta["val"].shape[1]
        replace(product, emit(NAME, product, aten.slice.Tensor, every, 1, start, stop))
        start = stop
    return True


def _after(first: fx.Node, key: fx.Node, order: dict[fx.Node, int]) -> set[fx.Node]:
    """What a key is computed from that comes after ``first``, or is ``first``."""
    found: set[fx.Node] = set()
    remaining = [key]
    while remaining:
        node = remaining.pop()
        if node not in found and order[node] >= order[first]:
            found.add(node)
            remaining += node.all_input_nodes
    return found
