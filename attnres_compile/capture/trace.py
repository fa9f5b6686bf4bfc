"""Model to fx graph: torch.export, Dynamo where that fails, then symbolic tracing, at last a run on the inputs."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from attnres_compile.capture.copies import shared_copy
from attnres_compile.capture.inputs import Inputs
from attnres_compile.errors import CaptureError


@dataclass
class Captured:
    """A graph of a model's forward, with fake tensors in ``meta["val"]``.

    Attributes:
        module: the graph.
        inputs: a value per placeholder: parameters, buffers and the example inputs.
        front_end: what traced it.
        program: the exported program that it belongs to, None for what the last two made.
    """

    module: fx.GraphModule
    inputs: list[Any]
    front_end: str
    program: torch.export.ExportedProgram | None


def capture(model: nn.Module, inputs: Inputs) -> Captured:
    """Trace the forward in eval mode, on a copy.

    Raises:
        CaptureError: no front end could; the message says what each of them said.
    """
    front_ends: tuple[tuple[str, Callable[[nn.Module, Inputs], Captured]], ...] = (
        ("torch.export", lambda m, i: _export(m, i, strict=False)),
        ("Dynamo", lambda m, i: _export(m, i, strict=True)),
        ("symbolic trace", _symbolic_trace),
        ("a run", _run),
    )
    failures = []
    for name, trace in front_ends:
        try:
            with _quiet():
                captured = trace(shared_copy(model).eval(), inputs)
        except Exception as error:  # a front end may fail in any way; the next one is asked
            failures.append(f"  {name}: {type(error).__name__}: {_first_lines(error)}")
        else:
            captured.front_end = name
            return captured
    raise CaptureError(f"{type(model).__name__} could not be traced:\n" + "\n".join(failures))


def from_program(
    program: torch.export.ExportedProgram, inputs: Inputs, module: fx.GraphModule | None = None
) -> Captured:
    """The graph of an exported program, or a copy of it; inputs that are not the user's are marked ``is_parameter``."""
    module = program.graph_module if module is None else module
    leaves = iter(pytree.tree_leaves((inputs.args, inputs.kwargs), is_leaf=lambda leaf: leaf is None))
    values: list[Any] = []
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            found = next(leaves, None)
            values.append(spec.arg.value if isinstance(spec.arg, ConstantArgument) else found)
            continue
        node.meta["is_parameter"] = True
        target = str(spec.target)
        values.append(program.state_dict[target] if target in program.state_dict else program.constants[target])
    return Captured(module, values, "torch.export", program)


def from_graph(module: fx.GraphModule, inputs: Inputs) -> Captured:
    """A graph module as it is, with fake tensors filled in."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    values: list[Any] = list(inputs.args)
    for node in placeholders[len(values) :]:
        default = node.args[0] if node.args else None
        # fx numbers the placeholders of arguments that were fixed in the trace.
        name = str(node.target)
        values.append(inputs.kwargs.get(name, inputs.kwargs.get(re.sub(r"_\d+$", "", name), default)))
    if any("val" not in node.meta for node in module.graph.nodes if node.op not in ("output", "get_attr")):
        # Shapes are wanted, no gradients: what autograd forbids (`out=`) is for its user to run without them.
        with _quiet(), torch.no_grad():
            Propagation(module, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*values)
    return Captured(module, values, "fx graph", None)


class Propagation(FakeTensorProp):
    """Fills in numbers as well as tensors: before PyTorch 2.13 a size had no value of its own."""

    def run_node(self, n: fx.Node) -> Any:
        """Run a node on fake tensors; its value is in ``meta["val"]``."""
        result = super().run_node(n)
        if isinstance(result, int | float):
            n.meta["val"] = result
        return result


def _export(model: nn.Module, inputs: Inputs, *, strict: bool) -> Captured:
    program = torch.export.export(model, inputs.args, inputs.kwargs, strict=strict)
    return from_program(program, inputs)


class _Tracer(fx.Tracer):
    """Traces into every module but the leaves of ``torch.nn``."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) and not any(True for _ in m.children())


def _symbolic_trace(model: nn.Module, inputs: Inputs) -> Captured:
    concrete = {key: value for key, value in inputs.kwargs.items() if not isinstance(value, torch.Tensor)}
    tracer = _Tracer()
    tracer.record_stack_traces = True
    graph = tracer.trace(model, concrete_args=concrete or None)
    module = fx.GraphModule(model, graph, type(model).__name__)
    return from_graph(module, inputs)


def _run(model: nn.Module, inputs: Inputs) -> Captured:
    """Follow one run on the example inputs, through what depends on their values (experts, early exits, ``item``).

    Other inputs may take other branches. A live stream does not mind: what the plan has no row for reads the sum.
    """
    leaves, spec = pytree.tree_flatten(inputs.fresh())
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def forward(*tensors: torch.Tensor) -> list[Any]:
        for i, tensor in zip(places, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return pytree.tree_leaves(model(*args, **kwargs))

    forward._orig_mod = model  # type: ignore[attr-defined] # whose module stack is recorded
    values = [leaves[i] for i in places]
    follow = make_fx(forward, pre_dispatch=True, record_module_stack=True, _error_on_data_dependent_ops=False)
    with torch.no_grad(), torch.random.fork_rng():
        module = follow(*values)
    return Captured(module, values, "", None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No fused encoder fast path (it hides the adds), no warnings about what tracing does to a throw-away copy."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400]
