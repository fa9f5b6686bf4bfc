"""Checks of a transformed model: zero queries reproduce the original, and the new parameters are alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnres_compile.attach import ATTRIBUTE
from attnres_compile.capture.inputs import Inputs, other_shapes
from attnres_compile.errors import RefusedError, VerificationError
from attnres_compile.report import Check
from attnres_compile.stream import Observer

Mode = Literal["full", "quick", "off"]
SEED = 0

# Largest error relative to the largest magnitude, for whole models. Many fp64 models norm in fp32 inside.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def run_checks(
    original: nn.Module, transformed: nn.Module, inputs: Inputs, pushes: dict[int, int] | None, mode: Mode
) -> list[Check]:
    """Run the checks on two models that may be worn out by it: counters and buffers in them move on.

    Args:
        original: the model before.
        transformed: the model after.
        inputs: one forward call.
        pushes: adds per chain that the analysis found, or None to leave that out.
        mode: "quick" compares one forward; "full" adds a second shape, training mode, and gradients.

    Raises:
        RefusedError: a run of either model ended in an error that shows why it cannot be transformed.
    """
    if mode == "off":
        return []
    with torch.random.fork_rng(), torch.enable_grad():
        with zero_queries(transformed):
            checks = [_forward(original, transformed, inputs, "zero queries equal the original")]
            if pushes is not None:
                checks.append(_seen(transformed, inputs, pushes))
            if mode == "full":
                second = next((other for other in other_shapes(inputs) if _runs(original, other)), None)
                if second is not None:
                    checks.append(_forward(original, transformed, second, "the same at a second shape"))
                for training in (False, True):
                    name = "training" if training else "eval"
                    checks.append(_gradients(original, transformed, inputs, training, f"gradients in {name} mode"))
        checks += _alive(transformed, inputs)
    return checks


def raise_failures(checks: list[Check], model: str) -> None:
    """Raise when a check failed.

    Raises:
        VerificationError: with every failed check and its figures.
    """
    failed = [check for check in checks if not check.passed]
    if failed:
        figures = "; ".join(f"{check.name}: {check.error:.1e} (allowed {check.tolerance:.0e})" for check in failed)
        raise VerificationError(
            f"{model} does not compute the same with depth attention: {figures}. The model is left as it was. If the "
            "model is noisy by itself, pass verify='off' and compare with attnres_compile.verify"
        )


@contextmanager
def zero_queries(model: nn.Module) -> Iterator[None]:
    """Set every pseudo-query to zero inside the block."""
    with _queries(model, lambda query: query.zero_()):
        yield


@contextmanager
def _queries(model: nn.Module, fill: Callable[[Tensor], object]) -> Iterator[None]:
    queries = [reads.query for reads in model.get_submodule(ATTRIBUTE).children()]
    before = [query.detach().clone() for query in queries]
    try:
        with torch.no_grad():
            for query in queries:
                assert isinstance(query, Tensor)
                fill(query)
        yield
    finally:
        with torch.no_grad():
            for query, value in zip(queries, before, strict=True):
                assert isinstance(query, Tensor)
                query.copy_(value)


def call(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Every floating-point tensor that one seeded forward returns."""
    torch.manual_seed(SEED)
    return tensors(model(*inputs.args, **inputs.kwargs))


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
        if not e.numel() or bool((a == e).all()):
            continue
        difference = float((a.double() - e.double()).abs().max())
        scale = float(e.double().abs().max())
        error = difference / scale if scale else difference
        worst = error if error > worst or error != error else worst
    return worst if worst == worst else float("inf")


def _tolerance(model: nn.Module, outputs: list[Tensor] | None = None) -> float:
    dtypes = {tensor.dtype for tensor in (*model.parameters(), *(outputs or ())) if tensor.is_floating_point()}
    return max((TOLERANCE.get(dtype, 1e-1) for dtype in dtypes), default=TOLERANCE[torch.float32])


def _runs(model: nn.Module, inputs: Inputs) -> bool:
    try:
        with torch.no_grad():
            call(model, inputs)
    except Exception:  # whatever the user's model says to another length, this shape is not one of its own
        return False
    return True


def _forward(
    original: nn.Module, transformed: nn.Module, inputs: Inputs, name: str, pushes: dict[int, int] | None
) -> Check:
    original.eval()
    transformed.eval()
    with torch.no_grad():
        expected, actual = call(original, inputs), call(transformed, inputs)
    return Check(name, relative_error(actual, expected), _tolerance(original, expected))


def _seen(transformed: nn.Module, inputs: Inputs, pushes: dict[int, int]) -> Check:
    transformed.eval()
    with torch.no_grad(), Observer() as observer:
        call(transformed, inputs)
    wrong = sum(abs(observer.pushes.get(chain, 0) - count) for chain, count in pushes.items())
    seen = sum(observer.pushes.get(chain, 0) for chain in pushes)
    return Check(f"pushes seen {seen} = adds found {sum(pushes.values())}", float(wrong), 0.0)


def _loss(outputs: list[Tensor]) -> Tensor:
    """A projection on fixed random numbers: a norm of normalised outputs would hardly depend on anything."""
    total = torch.zeros((), dtype=torch.float64)
    for i, output in enumerate(out for out in outputs if out.requires_grad):
        generator = torch.Generator().manual_seed(i)
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.device, output.dtype)
        total = total + (output * weights).sum().double().cpu() / max(output.numel(), 1) ** 0.5
    return total


def gradients(model: nn.Module, inputs: Inputs, names: list[str]) -> dict[str, Tensor | None]:
    """Gradients of the named parameters for a fixed projection of the outputs; None where one gets none."""
    named = dict(model.named_parameters())
    chosen = [named[name] for name in names if named[name].requires_grad]
    loss = _loss(call(model, inputs))
    if not loss.requires_grad or not chosen:
        return dict.fromkeys(names)
    try:
        found = torch.autograd.grad(loss, chosen, allow_unused=True)
    except RuntimeError as error:
        if "checkpoint" not in str(error).lower():
            raise
        raise RefusedError(
            "the model uses reentrant checkpointing, which loses the gradients of a residual stream; use "
            "`torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`"
        ) from error
    return dict(zip((name for name in names if named[name].requires_grad), found, strict=True))


def _gradients(original: nn.Module, transformed: nn.Module, inputs: Inputs, training: bool, name: str) -> Check:
    for model in (original, transformed):
        model.train(training)
    names = [name for name, parameter in original.named_parameters() if parameter.is_floating_point()]
    expected, actual = gradients(original, inputs, names), gradients(transformed, inputs, names)
    lost = [key for key, value in expected.items() if (value is None) != (actual[key] is None)]
    if lost:
        return Check(f"{name} ({len(lost)} of {len(expected)} lost, first {lost[0]})", float("inf"), 0.0)
    pairs = [(actual[key], value) for key, value in expected.items() if value is not None]
    scale = max((float(value.double().abs().max()) for _, value in pairs if value.numel()), default=0.0)
    worst = max((float((a.double() - e.double()).abs().max()) for a, e in pairs if a is not None and e.numel()), default=0.0)
    return Check(name, worst / scale if scale else worst, _tolerance(original))


def _alive(transformed: nn.Module, inputs: Inputs) -> list[Check]:
    """Random queries change the output, and every row of the parameters that a run reads with gets a gradient."""
    transformed.eval()
    generator = torch.Generator().manual_seed(SEED)

    def fill(query: Tensor) -> None:
        noise = torch.randn(query.shape, generator=generator, dtype=torch.float64)
        query.copy_((noise * 2 / query.shape[-1] ** 0.5).to(query.device, query.dtype))

    with torch.no_grad(), zero_queries(transformed):
        before = call(transformed, inputs)
    with _queries(transformed, fill):
        names = [name for name, _ in transformed.named_parameters() if name.startswith(f"{ATTRIBUTE}.")]
        found = gradients(transformed, inputs, [name for name in names if name.endswith("query")])
        with torch.no_grad():
            after = call(transformed, inputs)
    unchanged = 0.0 if relative_error(after, before) > 0 else 1.0
    rows = [row for gradient in found.values() if gradient is not None for row in gradient]
    dead = sum(1 for row in rows if not bool(row.any())) + sum(1 for gradient in found.values() if gradient is None)
    return [
        Check("random queries change the output", unchanged, 0.0),
        Check("reads without a gradient", float(dead), 0.0),
    ]
