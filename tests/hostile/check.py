"""The property: a program is equal at zero queries and at random ones, through both routes, or refused."""

import re
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, fx, nn

import attnres_compile as ac
from attnres_compile import api, graphs
from attnres_compile.attach import ATTRIBUTE
from attnres_compile.capture import trace
from attnres_compile.capture.copies import shared_copy
from attnres_compile.capture.inputs import Inputs
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import AttnResError, VerificationError
from attnres_compile.passes import base, pipelines
from attnres_compile.verification import tensors
from tests.hostile.programs import Program, build, inputs
from tests.hostile.reference import Interpreter, UnsureError
from tests.tolerances import TOLERANCE

Route = Literal["graph", "live", "export"]
EXACT = "equal"


class WrongError(AssertionError):
    """A wrong number, a chain that was half found, or an error that is none of ours."""


def outcome(program: Program, route: Route) -> str:
    """``equal``, ``equal, no chain``, or the reason of the refusal.

    Raises:
        WrongError: it is none of these.
    """
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _graph(program) if route == "graph" else _live(program, route)
        except VerificationError as error:
            raise WrongError(f"found by verification only: {error}") from error
        except AttnResError as error:
            return f"{type(error).__name__}: {normalised(str(error))}"


def run(model: nn.Module, example: Sequence[Tensor]) -> list[Tensor]:
    """The outputs in eval mode."""
    with torch.no_grad():
        return [tensor.detach().clone() for tensor in tensors(model.eval()(*example))]


def trained(model: nn.Module, example: Sequence[Tensor]) -> list[Tensor]:
    """The outputs; autograd may forbid the program's in-place operations.

    Raises:
        RuntimeError: it does.
    """
    outputs = tensors(model.eval()(*example))
    if any(output.requires_grad for output in outputs):
        torch.stack([output.sum() for output in outputs]).sum().backward()
    return [output.detach().clone() for output in outputs]


def symbolic(model: nn.Module, example: Inputs) -> trace.Captured:
    """The quickest capture that the product has."""
    try:
        captured = trace._symbolic_trace(shared_copy(model).eval(), example)
    except TypeError as error:
        raise ac.CaptureError(f"symbolic trace: {error}") from error
    captured.front_end = "symbolic trace"
    return captured


def _graph(program: Program) -> str:
    module = symbolic(build(program), Inputs(inputs(program), {})).module
    # Symbolic tracing takes `x += f` for `x = x + f`: what counts is the graph.
    try:
        expected = trained(module, inputs(program))
    except RuntimeError as error:
        return f"no program: {normalised(str(error))}"
    captured, subject = graphs.analyse_graph(module, Inputs(inputs(program), {}), _config(program))
    if not subject.chains:
        return _no_chain([refusal.reason for refusal in subject.refusals])
    interpreter = Interpreter(captured.module, subject.chains, program.block_size)
    return _compared(graphs.rewrite_graph(subject), interpreter, captured.inputs, inputs(program), expected)


def _config(program: Program) -> AttnResConfig:
    return AttnResConfig(block_size=program.block_size, strict=False)


def _live(program: Program, route: Route) -> str:
    model, example = build(program), Inputs(inputs(program), {})
    try:
        expected = trained(build(program), inputs(program))
    except RuntimeError as error:
        return f"no program: {normalised(str(error))}"
    captures: list[trace.Captured] = []

    def capture(model: nn.Module, example: Inputs) -> trace.Captured:
        captured = symbolic(model, example) if route == "live" else trace.capture(model, example)
        # Symbolic tracing takes `x += f` for `x = x + f`: another program where `x` is used again.
        if route == "live" and _error(run(captured.module, inputs(program)), expected):
            captured = trace.capture(model, example)
        captures.append(captured)
        return captured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "capture", capture)
        mode: Any = "quick" if route == "live" else "full"
        transformed = ac.transform(model, example.args, verify=mode, block_size=program.block_size, strict=False)
    report: Any = transformed.attnres_report
    if not report.chains:
        if worst := _error(run(transformed, inputs(program)), expected):
            raise WrongError(f"no chain, and error {worst:.1e}")
        return _no_chain([refusal.reason for refusal in report.refused])
    for outermost in (True, False):
        subject = base.run(pipelines.live(outermost=outermost), base.Subject(captures[0].module, _config(program)))
        if [len(chain.pushes) for chain in subject.chains] == [chain.adds for chain in report.chains]:
            break
    interpreter = Interpreter(captures[0].module, subject.chains, program.block_size, live=True)
    return _compared(transformed, interpreter, captures[0].inputs, example.args, expected)


def _no_chain(reasons: list[str]) -> str:
    return f"no chain: {normalised(reasons[0])}" if reasons else "no chain"


def _compared(
    transformed: nn.Module,
    interpreter: Interpreter,
    placed: Sequence[Any],
    example: Sequence[Tensor],
    expected: list[Tensor],
) -> str:
    """Zero queries against the original, random ones against the reference."""

    def fresh(values: Sequence[Any]) -> list[Any]:
        return [value.clone() if isinstance(value, Tensor) else value for value in values]

    allowed = _allowed(interpreter.graph)
    if (worst := _error(run(transformed, fresh(example)), expected)) > allowed:
        raise WrongError(f"zero queries: error {worst:.1e}")
    with torch.no_grad():
        try:
            rows = interpreter.learn(*fresh(placed))
        except UnsureError as error:
            raise WrongError(f"not refused: {error}") from error
        reads = [transformed.get_submodule(f"{ATTRIBUTE}.{i}") for i in range(len(rows))]
        made = [read.get_parameter("query").shape[0] for read in reads]
        if made != rows:
            raise WrongError(f"rows {made}, states read {rows}")
        interpreter.parameters = [_randomised(read) for read in reads]
        wanted = tensors(interpreter.run(*fresh(placed)))
    if (worst := _error(run(transformed, fresh(example)), wanted)) > allowed:
        raise WrongError(f"random queries: error {worst:.1e}")
    return EXACT


def _randomised(read: nn.Module) -> tuple[Tensor, Tensor]:
    query, key_norm = read.get_parameter("query"), read.get_parameter("key_norm")
    generator = torch.Generator().manual_seed(query.shape[0])
    query.copy_(torch.randn(query.shape, generator=generator, dtype=torch.float64))
    key_norm.copy_(1 + 0.3 * torch.randn(query.shape, generator=generator, dtype=torch.float64))
    return query, key_norm


def _allowed(graph: fx.Graph) -> float:
    values = [value for node in graph.nodes for value in tensors(node.meta.get("val"))]
    narrow = any(value.dtype == torch.float32 for value in values)
    return TOLERANCE[torch.float32 if narrow else torch.float64]


def _error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference, relative to what is larger than one; infinite where number or shapes differ."""
    if [tensor.shape for tensor in actual] != [tensor.shape for tensor in expected]:
        return float("inf")
    both = [(a, e) for a, e in zip(actual, expected, strict=True) if bool(e.isfinite().all())]
    return max((float((a - e).abs().max() / e.abs().max().clamp(min=1.0)) for a, e in both), default=0.0)


def normalised(reason: str) -> str:
    """A reason without what differs from program to program."""
    first = reason.splitlines()[0].split(" (/")[0]
    first = re.sub(r"(/\S+:\d+(: [^);]*)?|'[^']*'|\d+(\.\d+)?(e-?\d+)?)", "…", first)
    return re.sub(r"\([a-z_]*…?[a-z_…]*\)", "", first)[:160]
