"""Inline the nested graphs that gradient-mode, checkpoint and autocast regions become.

Before::

    %region = get_attr[target=submod_1]
    %out = call_function[target=wrap_with_set_grad_enabled](False, %region, %x, %w)
    %y = call_function[target=getitem](%out, 0)

After::

    %y = call_function[target=aten.linear.default](%x, %w)

Assumes that a region's operands follow its graph module in the arguments. An autocast region computes in another
dtype than its body says, so it is inlined only where the graph is read and not run (``autocast=True``).
Leaves every other higher-order operator alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from attnres_compile.arithmetic import as_addition, operation_name
from attnres_compile.passes.base import Subject

REGIONS = frozenset({"wrap_with_set_grad_enabled", "tag_activation_checkpoint", "wrap_activation_checkpoint"})
AUTOCAST = frozenset({"wrap_with_autocast"})


@dataclass(frozen=True)
class InlineRegions:
    """Pass: see the module's text.

    Attributes:
        autocast: also inline regions whose dtype the body does not say.
        frozen: also inline those without gradient that no stream passes through.
    """

    autocast: bool = False
    frozen: bool = True

    def __call__(self, subject: Subject) -> bool:
        """Inline until no region is left; regions nest."""
        names = REGIONS | AUTOCAST if self.autocast else REGIONS
        modified = False
        # In a graph that runs, what is computed without gradient stays so, unless the stream passes through it.
        while regions := [
            node
            for node in subject.module.graph.nodes
            if _is_region(node, names) and (self.frozen or node.args[0] is not False or _holds_sum(node, subject))
        ]:
            for node in regions:
                inline(subject.module, node)
            modified = True
        if modified:
            subject.edited = True
        return modified


def _is_region(node: fx.Node, names: frozenset[str]) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in names


def _holds_sum(region: fx.Node, subject: Subject) -> bool:
    body = _body(subject.module, region)[1]
    return any(
        node.op == "call_function"
        and (addition := as_addition(operation_name(node.target), node.args, node.kwargs)) is not None
        and isinstance(addition.skip, fx.Node)
        and not isinstance(addition.branch, int | float)
        for node in body.graph.nodes
    )


def _body(module: fx.GraphModule, region: fx.Node) -> tuple[int, fx.GraphModule]:
    """Position of a region's graph among its arguments, and that graph."""
    at = next(i for i, arg in enumerate(region.args) if isinstance(arg, fx.Node) and arg.op == "get_attr")
    reference = region.args[at]
    assert isinstance(reference, fx.Node)
    body = module.get_submodule(str(reference.target))
    assert isinstance(body, fx.GraphModule)
    return at, body


def inline(module: fx.GraphModule, region: fx.Node) -> None:
    """Replace one region by copies of the nodes of its body."""
    at, body = _body(module, region)
    reference = region.args[at]
    assert isinstance(reference, fx.Node)
    for name, child in body.named_children():  # regions nested in this one
        module.add_submodule(f"{reference.target}_{name}", child)
    placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
    copies = dict(zip(placeholders, region.args[at + 1 :], strict=True))
    outputs: object = ()
    with module.graph.inserting_before(region):
        for node in body.graph.nodes:
            if node.op == "output":
                outputs = fx.node.map_arg(node.args[0], lambda n: copies[n])
            elif node.op != "placeholder":
                copies[node] = copy = module.graph.node_copy(node, lambda n: copies[n])
                if node.op == "get_attr":
                    copy.target = f"{reference.target}_{node.target}"
    for user in list(region.users):
        user.replace_all_uses_with(outputs[user.args[1]])  # type: ignore[index]
        module.graph.erase_node(user)
    module.graph.erase_node(region)
    if not reference.users:
        module.graph.erase_node(reference)
