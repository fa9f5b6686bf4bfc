"""Graphs for the tests of the passes, and what is compared of them. Parameters are left out of the listings."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from attnres_compile.capture.inputs import Inputs
from attnres_compile.capture.trace import Captured, Propagation, from_program
from attnres_compile.chains import ResidualChain
from attnres_compile.config import AttnResConfig
from attnres_compile.passes.base import Subject


def example(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers, `[2, 5, 3]` unless a shape is given."""
    return torch.randn(shape or (2, 5, 3), generator=torch.Generator().manual_seed(seed))


def exported(model: nn.Module, *inputs: Tensor) -> Captured:
    """The graph that torch.export makes of a model in eval mode."""
    inputs = inputs or (example(),)
    return from_program(torch.export.export(model.eval(), inputs), Inputs(inputs, {}))


def traced(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    """The graph of symbolic tracing, which calls leaf modules, with values and source lines."""
    tracer = fx.Tracer()
    tracer.record_stack_traces = True
    module = fx.GraphModule(model.eval(), tracer.trace(model))
    Propagation(module, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*(inputs or (example(),)))
    return module


def subject(module: fx.GraphModule, chains: Sequence[ResidualChain] = (), /, **options: Any) -> Subject:
    return Subject(module, AttnResConfig(**options), list(chains))


def listing(module: fx.GraphModule) -> list[str]:
    """`name = operation(arguments)` for all but parameters; of the arguments nodes and numbers are shown."""
    kept = [n for n in module.graph.nodes if n.op != "get_attr" and not n.meta.get("is_parameter")]

    def shown(value: Any) -> list[str]:
        if isinstance(value, fx.Node):
            return [value.name] if value in kept else []
        if isinstance(value, list | tuple):
            inside = [text for item in value for text in shown(item)]
            return [f"[{', '.join(inside)}]"] if inside else []
        return [str(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []

    lines = []
    for node in kept:
        if node.op == "placeholder":
            continue
        target = str(node.target) if not callable(node.target) else getattr(node.target, "__name__", str(node.target))
        arguments = [text for argument in node.args for text in shown(argument)]
        lines.append(f"{node.name} = {target.removesuffix('.default')}({', '.join(arguments)})")
    return lines


def operations(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def structure(chain: ResidualChain) -> dict[str, Any]:
    """A chain by the names of its nodes."""
    return {
        "source": chain.source.name,
        "pushes": {push.node.name: push.position for push in chain.pushes},
        "readers": {position: [node.name for node in nodes] for position, nodes in sorted(chain.readers.items())},
    }
