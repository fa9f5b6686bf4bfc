"""Oracles (a) and (d) on one model of the zoo: zero queries reproduce it, and the two routes agree."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from attnres_compile import api, graphs
from attnres_compile.arithmetic import CASTS, UNCHANGED, operation_name
from attnres_compile.attach import ATTRIBUTE
from attnres_compile.capture.copies import shared_copy
from attnres_compile.capture.inputs import Inputs, normalise
from attnres_compile.capture.trace import capture
from attnres_compile.config import AttnResConfig
from attnres_compile.observer import Observer
from attnres_compile.verification import call, gradients, relative_error
from tests.zoo import Case

OPTIONS: tuple[dict[str, Any], ...] = ({"num_blocks": 2}, {"num_blocks": 3}, {"block_size": 1})
FIRST = (2, 8)


@dataclass
class Measured:
    """Largest relative errors of one model, by what was compared."""

    errors: dict[str, float] = field(default_factory=dict)
    pushes: tuple[int, ...] = ()
    adds: tuple[int, ...] = ()
    sublayers: tuple[int, ...] = ()

    def note(self, what: str, error: float) -> None:
        """Keep the larger error."""
        self.errors[what] = max(error, self.errors.get(what, 0.0))


def inputs_of(case: Case, model: nn.Module, dtype: torch.dtype, shape: tuple[int, int]) -> Inputs:
    """One forward call of a case at a batch and a length."""
    tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in case.inputs(*shape).items()}
    return normalise(model, tensors)


def shapes(case: Case) -> tuple[tuple[int, int], tuple[int, int]]:
    """Two batches and lengths; the length stays where the model's program has only one."""
    lengths = any(1 in dims for dims in case.dynamic.values())
    return FIRST, (3, 11 if lengths else FIRST[1])


def measure(case: Case, dtype: torch.dtype) -> Measured:
    """Compare outputs and gradients in eval and in training, at two shapes, through both routes, for each plan."""
    model, measured = case.build().to(dtype), Measured()
    calls = [inputs_of(case, model, dtype, shape) for shape in shapes(case)]
    captured = capture(model, calls[0])
    programs = {mode: export(case, model, calls[0], mode) for mode in (False, True)}
    expected = {mode: [run(model, inputs, mode) for inputs in calls] for mode in (False, True)}
    for options in OPTIONS:
        config = AttnResConfig(**options)
        _, found, adds = api._found(model, captured, calls[0], config, outermost=True)
        live = api._attached(shared_copy(model), found, config)
        with Observer() as observer, torch.no_grad():
            call(live.eval(), calls[0])
        measured.pushes, measured.adds = tuple(observer.pushes.values()), tuple(adds.values())
        measured.sublayers = tuple(len(attachment.plan.sources) for attachment in found)
        for mode, program in programs.items():
            graph = graphs.rewrite_program(*graphs.analyse_program(program, config)).module()
            where = "train" if mode else "eval"
            for inputs, (outputs, grads) in zip(calls, expected[mode], strict=True):
                for route, transformed in (("live", live), ("graph", graph)):
                    actual, actual_grads = run(transformed, inputs, mode)
                    measured.note(f"{route} {where} outputs", relative_error(actual, outputs))
                    measured.note(f"{route} {where} gradients", gradient_error(actual_grads, grads))
    return measured


def run(model: nn.Module, inputs: Inputs, training: bool) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Seeded outputs, and the gradients of every trainable parameter that is not the transformation's own."""
    if not isinstance(model, fx.GraphModule):
        model.train(training)
    trainable = [n for n, p in model.named_parameters() if p.is_floating_point() and p.requires_grad]
    names = [n for n in trainable if not n.startswith(f"{ATTRIBUTE}.")]
    return gradients(model, inputs, names)


def gradient_error(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> float:
    """Largest difference of gradients relative to the largest gradient; infinite where one is missing."""
    if any((actual[name] is None) != (gradient is None) for name, gradient in expected.items()):
        return float("inf")
    names = [name for name, gradient in expected.items() if gradient is not None]
    sides = ([gradient for name in names if (gradient := side[name]) is not None] for side in (actual, expected))
    ours, theirs = (torch.cat([gradient.double().flatten() for gradient in side]) for side in sides)
    return relative_error([ours], [theirs])


def export(case: Case, model: nn.Module, inputs: Inputs, training: bool, dynamic: bool = True) -> ExportedProgram:
    """The case's exported program in eval or training mode, with its dynamic shapes."""
    shapes = {name: case.dynamic.get(name) for name in inputs.kwargs} if dynamic else None
    copied = shared_copy(model).train(training)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return torch.export.export(copied, inputs.args, inputs.kwargs, dynamic_shapes=shapes, strict=False)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def randomise(reads: dict[str, Tensor]) -> None:
    """Random queries and key norms, the same for the same names."""
    for name in sorted(reads):
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        noise = torch.randn(reads[name].shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            reads[name].copy_(noise * 2 / noise.shape[-1] ** 0.5 if name.endswith("query") else 1 + noise / 4)


def reads_of(model: nn.Module) -> dict[str, Tensor]:
    """The transformation's own parameters."""
    return {n: p.data for n, p in model.named_parameters() if n.startswith(f"{ATTRIBUTE}.")}


def structure(graph: fx.Graph) -> int:
    """A digest of what the output depends on: equal for graphs that are equal up to names, order and vain casts."""
    digests: dict[fx.Node, int] = {}

    def digest(node: fx.Node) -> Any:
        return Digest(digests[node])

    for node in graph.nodes:
        if not _counts(node):
            digests[node] = digests[_source(node)]
            continue
        args = fx.node.map_arg((node.args, node.kwargs), digest)
        name = "" if node.op == "output" else str(node.target)
        digests[node] = hash((node.op, name, repr(args)))
    return digests[graph.output_node()]


def _counts(node: fx.Node) -> bool:
    if node.op != "call_function":
        return True
    name = operation_name(node.target)
    before, after = (n.meta.get("val") if isinstance(n, fx.Node) else None for n in (_source(node), node))
    same = isinstance(before, Tensor) and isinstance(after, Tensor) and before.dtype == after.dtype
    return not (name in CASTS | UNCHANGED and same)


def _source(node: fx.Node) -> Any:
    return node.args[0] if node.args else None


class Digest:
    """Stands for a node in a printed argument."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"<{self.value}>"
