"""Checks of a transformed model: zero queries reproduce the original, and the new parameters are alive."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnres_compile.attach import ATTRIBUTE
from attnres_compile.capture.copies import shared_copy
from attnres_compile.capture.inputs import Inputs, other_shapes
from attnres_compile.errors import RefusedError, VerificationError
from attnres_compile.observer import Observer
from attnres_compile.report import Check

Mode = Literal["full", "quick", "off"]
SEED = 0

PUSHES, READS = "pushes seen", "reads made"
NO_CHANGE, NO_GRADIENT = "random queries change the output", "chains whose queries get no gradient"
UNRECORDED = (
    "Its layers run where autograd does not record them (under torch.no_grad, or in an autograd function of its own, "
    "as reversible layers do), or its reads cancel out (x - x, a branch times zero). Leave it out with `chains=`, or "
    "change that"
)
NOISY = "If the model is noisy by itself, pass verify='off' and compare with attnres_compile.verify"

# Largest error relative to the largest magnitude, for whole models. Many fp64 models norm in fp32 inside.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def run_checks(
    original: nn.Module, transformed: nn.Module, inputs: Inputs, pushes: dict[int, int] | None, mode: Mode
) -> list[Check]:
    """Run the checks on copies of the two models that share their parameters.

    Args:
        original: the model before.
        transformed: the model after.
        inputs: one forward call.
        pushes: adds per chain that the analysis found, or None to leave that out.
        mode: "quick" compares one forward; "full" adds a second shape, training mode, and gradients.

    Raises:
        RefusedError: a run of either model ended in an error that shows why it cannot be transformed, or changed what
            a stream keeps.
    """
    if mode == "off":
        return []
    checks = []
    with torch.random.fork_rng(), torch.enable_grad():
        observer = _observed(transformed, inputs)
        tolerance = _tolerance(original, observer)
        pair = _Pair(original, transformed, tolerance)
        checks.append(pair.forward("zero queries equal the original", inputs))
        if not checks[0].passed:
            observer.refuse_in_place()
        if pushes is not None:
            wrong = sum(abs(observer.pushes.get(chain, 0) - count) for chain, count in pushes.items())
            seen = sum(observer.pushes.get(chain, 0) for chain in pushes)
            checks.append(Check(f"{PUSHES} {seen} = adds found {sum(pushes.values())}", float(wrong), 0.0))
        if mode == "full":
            second = next((other for other in other_shapes(inputs) if _runs(original, other)), None)
            if second is not None:
                checks.append(pair.forward("the same at a second shape", second))
            checks.append(pair.gradients("gradients in eval mode", inputs, training=False))
            checks.append(pair.gradients("outputs and gradients in training mode", inputs, training=True))
        if not all(check.passed for check in checks if check.tolerance):
            observer.refuse_in_place()
        checks += _alive(transformed, inputs, observer if pushes is not None else None)
    return checks


def unlearned(checks: list[Check]) -> tuple[int, ...]:
    """The chains, by number among the rewritten, whose reads would learn nothing, where that is all that is wrong."""
    failed = [check for check in checks if not check.passed]
    return failed[0].chains if len(failed) == 1 else ()


def raise_failures(checks: list[Check], model: str) -> None:
    """Raise when a check failed.

    Raises:
        RefusedError: the model computes the same, but no output depends on a chain's queries, or the live streams are
            not those of the graph.
        VerificationError: with every failed check and its figures.
    """
    failed = [check for check in checks if not check.passed]
    figures = "; ".join(f"{check.name}: {check.error:.1e} (allowed {check.tolerance:.0e})" for check in failed)
    dead = [check.name for check in failed if check.name.startswith((NO_CHANGE, NO_GRADIENT))]
    if failed and len(dead) == len(failed):
        raise RefusedError(
            f"nothing would learn from the reads of {model}: its outputs do not depend on the reads of every chain "
            f"({figures}). The model is left as it was. {UNRECORDED}"
        )
    counts = [check.name for check in failed if check.name.startswith((PUSHES, READS))]
    if failed and len(dead) + len(counts) == len(failed):
        raise RefusedError(
            f"the live streams of {model} are not those of its graph ({figures}): at some call a module gets the "
            "stream in another argument, gets a tensor in its place, or hands on what it also adds to. The model is "
            "left as it was. Give every visit a module of its own, or transform the exported program, whose graph "
            "tells the calls apart"
        )
    if failed:
        raise VerificationError(
            f"{model} does not compute the same with depth attention: {figures}. The model is left as it was. {NOISY}"
        )


def call(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Every floating-point tensor that one seeded forward returns."""
    torch.manual_seed(SEED)
    args, kwargs = inputs.fresh()
    return tensors(model(*args, **kwargs))


def tensors(output: Any) -> list[Tensor]:
    """Every floating-point tensor in nested tuples, lists and dicts."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        return [found for item in output.values() for found in tensors(item)]
    if isinstance(output, list | tuple):
        return [found for item in output for found in tensors(item)]
    return []


def relative_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference relative to the largest magnitude; infinite where number or shapes differ."""
    if len(actual) != len(expected) or any(a.shape != e.shape for a, e in zip(actual, expected, strict=True)):
        return float("inf")
    worst = 0.0
    for a, e in zip(actual, expected, strict=True):
        differs = a != e
        if not bool(differs.any()):
            continue
        # Where both are the same infinity (masked logits) there is no difference.
        difference, scale = _magnitude((a - e)[differs]), _magnitude(e[e.isfinite()])
        error = difference / scale if scale else difference
        worst = error if error > worst or error != error else worst
    return worst if worst == worst else float("inf")


def _in_mode(model: nn.Module, training: bool) -> nn.Module:
    """A copy in eval or in training mode; what torch.export makes has only the mode it was captured in."""
    copied = shared_copy(model)
    with contextlib.suppress(NotImplementedError):
        copied.train(training)
    return copied


def _tolerance(model: nn.Module, observer: Observer) -> float:
    """That of the narrowest dtype which the model computes in."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} | observer.dtypes
    return max((TOLERANCE.get(dtype, 1e-1) for dtype in dtypes), default=TOLERANCE[torch.float32])


def _observed(transformed: nn.Module, inputs: Inputs) -> Observer:
    model = _in_mode(transformed, False)
    with torch.no_grad(), Observer() as observer:
        observer.dtypes |= {output.dtype for output in call(model, inputs)}
    observer.refuse_changed()
    return observer


def _runs(model: nn.Module, inputs: Inputs) -> bool:
    try:
        with torch.no_grad():
            call(_in_mode(model, False), inputs)
    except Exception:  # whatever the user's model says to another length, this shape is not one of its own
        return False
    return True


@dataclass(frozen=True)
class _Pair:
    """The two models. Each check takes fresh copies: a forward may change buffers, counters and flags."""

    original: nn.Module
    transformed: nn.Module
    tolerance: float

    def fresh(self, training: bool) -> tuple[nn.Module, nn.Module]:
        transformed = _in_mode(self.transformed, training)
        for reads in transformed.get_submodule(ATTRIBUTE).children():
            # The copy shares the parameters, which a user may have trained; its queries are zeros of its own.
            reads.query = nn.Parameter(torch.zeros_like(reads.get_parameter("query")))
        return _in_mode(self.original, training), transformed

    def forward(self, name: str, inputs: Inputs) -> Check:
        original, transformed = self.fresh(training=False)
        with torch.no_grad():
            expected, actual = call(original, inputs), call(transformed, inputs)
        return Check(name, relative_error(actual, expected), self.tolerance)

    def gradients(self, name: str, inputs: Inputs, *, training: bool) -> Check:
        original, transformed = self.fresh(training)
        names = [name for name, p in original.named_parameters() if p.requires_grad and p.is_floating_point()]
        expected_outputs, expected = gradients(original, inputs, names)
        outputs, actual = gradients(transformed, inputs, names)
        lost = [key for key, value in expected.items() if (value is None) != (actual[key] is None)]
        if lost:
            return Check(f"{name} ({len(lost)} of {len(expected)} lost, first {lost[0]})", float("inf"), 0.0)
        both = zip(actual.values(), expected.values(), strict=True)
        pairs = [(a, e) for a, e in both if a is not None and e is not None]
        scale = max((_magnitude(e) for _, e in pairs), default=0.0)
        worst = max((_magnitude(a - e) for a, e in pairs), default=0.0)
        error = max(worst / scale if scale else worst, relative_error(outputs, expected_outputs))
        return Check(name, error, self.tolerance)


def _magnitude(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), float("inf"))) if tensor.numel() else 0.0


def _loss(outputs: list[Tensor]) -> Tensor:
    """A projection on fixed random numbers: a norm of normalised outputs would hardly depend on anything."""
    total = torch.zeros((), dtype=torch.float64)
    for i, output in enumerate(out for out in outputs if out.requires_grad):
        generator = torch.Generator().manual_seed(i)
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.device, output.dtype)
        total = total + (output * weights).sum().double().cpu() / max(output.numel(), 1) ** 0.5
    return total


def gradients(model: nn.Module, inputs: Inputs, names: list[str]) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """The outputs, and gradients of the named parameters for a fixed projection of them; None where one gets none.

    Raises:
        RefusedError: the model uses reentrant checkpointing.
    """
    outputs = call(model, inputs)
    loss = _loss(outputs)
    if not loss.requires_grad or not names:
        return outputs, dict.fromkeys(names)
    try:
        found = torch.autograd.grad(loss, [model.get_parameter(name) for name in names], allow_unused=True)
    except RuntimeError as error:
        if "checkpoint" not in str(error).lower():
            raise
        raise RefusedError(
            "the model uses reentrant checkpointing, which loses the gradients of a residual stream; use "
            "`torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`"
        ) from error
    return outputs, dict(zip(names, found, strict=True))


def _alive(transformed: nn.Module, inputs: Inputs, observer: Observer | None) -> list[Check]:
    """Random queries change the output, every row is read, and every chain's parameters get a gradient."""
    generator = torch.Generator().manual_seed(SEED)
    model = _in_mode(transformed, False)
    chains = list(model.get_submodule(ATTRIBUTE).children())
    with torch.no_grad():
        for reads in chains:
            shape, like = reads.get_parameter("query").shape, reads.get_parameter("query")
            noise = torch.randn(shape, generator=generator, dtype=torch.float64) * 2 / shape[-1] ** 0.5
            reads.query = nn.Parameter(noise.to(like.device, like.dtype))
    names = [f"{ATTRIBUTE}.{i}.query" for i in range(len(chains))]
    after, found = gradients(model, inputs, names)
    with torch.no_grad():
        for reads in chains:
            reads.get_parameter("query").zero_()
        before = call(model, inputs)
    unchanged = 0.0 if relative_error([a.detach() for a in after], before) > 0 else 1.0
    dead = tuple(i for i, gradient in enumerate(found.values()) if gradient is None or not bool(gradient.any()))
    which = f" ({', '.join(map(str, dead))})" if dead else ""
    checks = [Check(NO_CHANGE, unchanged, 0.0), Check(NO_GRADIENT + which, float(len(dead)), 0.0, dead)]
    if observer is not None:
        rows = sum(reads.get_parameter("query").shape[0] for reads in chains)
        checks.append(Check(f"{READS} {len(observer.rows)} = rows {rows}", float(rows - len(observer.rows)), 0.0))
    return checks
