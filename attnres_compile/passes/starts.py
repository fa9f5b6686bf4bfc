"""Where streams start: the value that crosses into the first module that holds an add, and its feature axis."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from torch import fx

from attnres_compile.arithmetic import (
    CASTS,
    DROPOUTS,
    PERMUTATIONS,
    ROW_MAJOR,
    UNCHANGED,
    as_addition,
    carried_axis,
    permutation,
)
from attnres_compile.chains import ResidualChain, Start
from attnres_compile.passes import _nodes
from attnres_compile.passes.residual_sums import Sums, carried_input

CHANNELS_FIRST = frozenset(
    {"conv1d", "conv2d", "conv3d", "convolution", "group_norm", "batch_norm", "instance_norm", "GroupNorm"}
    | {"BatchNorm1d", "BatchNorm2d", "Conv1d", "Conv2d", "Conv3d", "cudnn_batch_norm", "_native_batch_norm_legit"}
    | {"avg_pool2d", "max_pool2d", "adaptive_avg_pool2d", "AvgPool2d", "MaxPool2d", "AdaptiveAvgPool2d"}
)
FEATURES_LAST = frozenset(
    {"layer_norm", "rms_norm", "linear", "LayerNorm", "RMSNorm", "Linear", "matmul", "addmm", "mm"}
)
# What leaves every axis where it is.
PASSING = UNCHANGED | CASTS | DROPOUTS | {"add", "add_", "mul", "pad", "constant_pad_nd", "roll"}


class Source(NamedTuple):
    """A chain's source: its feature axis (from the end), and the module boundary that it crosses, if any."""

    axis: int
    start: Start | None


def sources(module: fx.GraphModule, sums: Sums) -> dict[fx.Node, Source]:
    """Nodes at which a stream of two adds or more may start; one that turns out to be carried starts nothing."""
    found: dict[fx.Node, Source] = {}
    seen = {add.node for add in sums.residual}
    for add in sums.residual:
        if add.root not in seen and sums.depth[add.root] > 1:
            seen.add(add.root)
            node, start = _crossing(list(add.path), _nodes.calls(add.node)) or (add.root, None)
            axis = feature_axis(node, module)
            width = (_nodes.shape(node) or (None,))[axis]
            if node not in found and isinstance(width, int):
                found[node] = Source(axis, start)
    return found


def upstream(chain: ResidualChain, module: fx.GraphModule) -> tuple[fx.Node, Source] | None:
    """For a source made beside the first add: the module output that it is a sum or a scaled form of, if any."""
    crossing = _crossing_before(chain.source, _nodes.calls(chain.pushes[0].node), module, depth=8)
    return None if crossing is None else (crossing[0], Source(feature_axis(crossing[0], module), crossing[1]))


def _crossing_before(
    node: fx.Node, inside: tuple[_nodes.Call, ...], module: fx.GraphModule, depth: int
) -> tuple[fx.Node, Start] | None:
    for previous in _upstream(node, module) if depth else []:
        crossing = _crossing([previous], inside) or _crossing_before(previous, inside, module, depth - 1)
        if crossing is not None:
            return crossing
    return None


def _crossing(path: list[fx.Node], inside: tuple[_nodes.Call, ...]) -> tuple[fx.Node, Start] | None:
    while path and (path[-1].op == "get_attr" or path[-1].meta.get("is_parameter")):
        path = path[:-1]  # a parameter crosses no boundary, what it is expanded to may
    if not path:
        return None
    outer = _nodes.calls(path[-1])
    shared = 0
    while shared < min(len(inside), len(outer)) and inside[shared].key == outer[shared].key:
        shared += 1
    if shared < len(inside):
        entered = inside[shared]
        node = next(n for n in path if all(call.key != entered.key for call in _nodes.calls(n)))
        return node, Start(entered.path, "argument", _nodes.shape(node) or (), entered.key)
    if shared < len(outer):
        left = outer[shared]
        node = next(n for n in path if any(call.key == left.key for call in _nodes.calls(n)))
        return node, Start(left.path, "output", _nodes.shape(node) or (), left.key)
    return None


def at_output(chain: ResidualChain) -> Start | None:
    """For a source that several modules receive: the module that it is the output of, if any."""
    depth = len(chain.container.split(".")) + 1 if chain.container else 1
    receivers = {_nodes.calls(push.node)[depth : depth + 1] for push in chain.pushes if push.previous is None}
    if len(receivers) < 2 or chain.start is None or chain.start.side == "output":
        return None
    inside, outer = _nodes.calls(chain.pushes[0].node), _nodes.calls(chain.source)
    shared = 0
    while shared < min(len(inside), len(outer)) and inside[shared].key == outer[shared].key:
        shared += 1
    if shared == len(outer):
        return None
    return Start(outer[shared].path, "output", chain.start.shape, outer[shared].key)


def sees(start: Start, user: fx.Node) -> bool:
    """Whether a live stream has started where a node uses the source: the source itself stays a tensor."""
    paths = [call.path for call in _nodes.calls(user)]
    if start.side == "argument":
        return not start.module or start.module in paths
    return start.call not in [call.key for call in _nodes.calls(user)]


def _upstream(node: fx.Node, module: fx.GraphModule) -> list[fx.Node]:
    if (source := carried_input(node, module)) is not None:
        return [source]
    if node.op not in ("call_function", "call_method"):
        return []
    addition = as_addition(_nodes.name_of(node, module), node.args, node.kwargs)
    if addition is None or addition.product is not None:
        return []
    operands = [o for o in (addition.skip, addition.branch) if isinstance(o, fx.Node) and o.op != "get_attr"]
    return [o for o in operands if _nodes.shape(o) == _nodes.shape(node) and _nodes.calls(o)]


def feature_axis(source: fx.Node, module: fx.GraphModule) -> int:
    """The axis that the first norm, convolution or matrix product downstream normalises or mixes.

    Where nothing downstream tells, the one that the source was made with; failing that, the last.
    """
    ndim = len(_nodes.shape(source) or ())
    # Which axis of the source each axis of a node is; None where a reshape does not tell.
    queue: deque[tuple[fx.Node, list[int | None]]] = deque([(source, list(range(ndim)))])
    seen = {source}
    while queue:
        node, order = queue.popleft()
        for user in node.users:
            mixed = _mixed(user, order, module)
            if mixed is not None:
                return mixed - ndim
            after = _moved(user, node, order, module)
            if after is not None and user not in seen and len(seen) < 64:
                seen.add(user)
                queue.append((user, after))
    return _made_with(source, module)


def _made_with(source: fx.Node, module: fx.GraphModule) -> int:
    """The axis that the last norm, convolution or matrix product upstream mixed; the last one where there is none."""
    node, order = source, list[int | None](range(len(_nodes.shape(source) or ())))
    while (mixed := _mixed(node, order, module)) is None:
        sizes = _sizes(node)
        previous = next((n for n in node.all_input_nodes if _sizes(n) == sizes), None)
        if previous is None or (came_from := _moved(node, previous, list(range(len(sizes))), module)) is None:
            return -1
        order = [order[came_from.index(i)] if i in came_from else None for i in range(len(sizes))]
        node = previous
    return mixed - len(order)


def _sizes(node: fx.Node) -> list[int]:
    # By name: one that data decide is a symbol, which has no place among numbers.
    return sorted(_nodes.shape(node) or (), key=str)


def _mixed(node: fx.Node, order: list[int | None], module: fx.GraphModule) -> int | None:
    """Of the axes of what a node reads, or makes, the one that it normalises or mixes, if it does."""
    name = _nodes.name_of(node, module)
    if name in FEATURES_LAST:
        return order[-1]
    return order[1] if name in CHANNELS_FIRST and len(order) > 2 else None


def _moved(user: fx.Node, node: fx.Node, order: list[int | None], module: fx.GraphModule) -> list[int | None] | None:
    """The axes behind an operation that moves them at most, or None behind another one."""
    name, before, sizes = _nodes.name_of(user, module), _nodes.shape(node), _nodes.shape(user) or ()
    after = order if name in PASSING else None
    if name in PERMUTATIONS and (moved := permutation(name, user.args, len(order))) is not None:
        after = [order[i] for i in moved]
    elif name in ROW_MAJOR and before:
        moves = {carried_axis(name, user.args, before, sizes, i): order[i] for i in range(-len(order), 0)}
        after = [moves.get(i) for i in range(-len(sizes), 0)]
    return after if after is not None and len(sizes) == len(after) else None
