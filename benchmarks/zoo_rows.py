"""The rows of a zoo: what both routes make of a model. Each has a process of its own, several run at a time."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import nn
from torch.utils import _pytree as pytree

import attnres_compile as ac
from attnres_compile.capture.copies import shared_copy
from attnres_compile.capture.inputs import Inputs, other_shapes
from attnres_compile.verification import call, relative_error

Row = dict[str, Any]
TOLERANCE = 1e-5


def moved(model: nn.Module) -> nn.Module:
    """The model in eval mode, its parameters moved away from zeros and ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.nan_to_num_(0.0).add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def measured(row: Row, build: Callable[[], tuple[nn.Module, Inputs]]) -> Row:
    """The row with what both routes made of the model that ``build`` makes, and of a call that it takes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        original, inputs = build()
    except Exception as error:
        return row | {"status": "not built", "reason": str(error)[:600]}
    row["live"] = _timed(lambda: live(original, inputs))
    if row["live"]["status"] == "not traced" and "input_ids" in inputs.kwargs:
        # Some make the mask themselves unless they are traced.
        inputs.kwargs["attention_mask"] = torch.ones_like(inputs.kwargs["input_ids"])
        row["live"] = _timed(lambda: live(original, inputs))
    row["graph"] = _timed(lambda: graph(original, inputs))
    if any(row[route]["status"] in ("wrong", "refused by verification") for route in ("live", "graph")):
        # Random parameters may make a model that amplifies every rounding: fp64 tells.
        double, precise = original.double(), Inputs(*pytree.tree_map_only(torch.Tensor, _doubled, tuple(inputs)))
        row |= {"dtype": "fp64", "live": _timed(lambda: live(double, precise))}
        row["graph"] = _timed(lambda: graph(double, precise))
    states = [row[route]["status"] for route in ("live", "graph")]
    order = ("failed", "wrong", "exact", "refused", "refused by verification", "not traced")
    return row | {"status": next(state for state in order if state in states)}


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def live(model: nn.Module, inputs: Inputs) -> Row:
    """Transform the module and compare at two shapes."""
    transformed = ac.transform(model, inputs.kwargs or inputs.args, block_size=3, verify="quick")
    report: Any = transformed.attnres_report
    worst = _error(model, transformed, inputs)
    for shape in other_shapes(inputs):
        try:
            with torch.no_grad():
                call(shared_copy(model), shape)
        except Exception:  # not a shape of the model's
            continue
        worst = max(worst, _error(model, transformed, shape))
        break
    return _described(report, worst)


def _error(model: nn.Module, transformed: nn.Module, inputs: Inputs) -> float:
    with torch.no_grad():
        return relative_error(call(shared_copy(transformed), inputs), call(shared_copy(model), inputs))


def graph(model: nn.Module, inputs: Inputs) -> Row:
    """Transform the exported program and compare."""
    copied = shared_copy(model)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        program = torch.export.export(copied, inputs.args, inputs.kwargs, strict=False)
    except Exception as error:
        return {"status": "not exported", "reason": f"{type(error).__name__}: {error}"[:300]}
    transformed: Any = ac.transform(program, block_size=3, verify="quick")
    with torch.no_grad():
        expected = call(shared_copy(model), inputs)
        error = relative_error(call(transformed.module(), inputs), expected)
    return _described(transformed.attnres_report, error)


def _described(report: Any, error: float) -> Row:
    rewritten = [chain for chain in report.chains if chain.rewritten]
    return {
        "status": "exact" if error <= TOLERANCE else "wrong",
        "error": error,
        "adds": [chain.adds for chain in rewritten],
        "sublayers": [chain.sublayers for chain in rewritten],
        "widths": [chain.width for chain in rewritten],
        "left_out": sum(chain.adds for chain in report.chains if not chain.rewritten),
        "uncovered": [f"{r.reason} ({r.where})"[:300] for r in report.refused],
    }


def _timed(run: Callable[[], Row]) -> Row:
    began = time.perf_counter()
    try:
        result = run()
    except ac.RefusedError as error:
        kind = "refused by verification" if isinstance(error, ac.VerificationError) else "refused"
        result = {"status": kind, "reason": str(error)[:2000]}
    except ac.CaptureError as error:
        result = {"status": "not traced", "reason": str(error)[:900]}
    except Exception as error:
        result = {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:600]}
    return result | {"seconds": round(time.perf_counter() - began, 2)}


def go_on(
    description: str | None, every: Mapping[str, Row], file: Path, measure: Callable[[Row], Row]
) -> dict[str, Row]:
    """Measure what has no row yet, or what the command line names; the rows of so far."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--limit", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    wanted = options.names or [name for name in every if name not in rows(file)]
    wanted = wanted[: 0 if options.table else options.limit]
    found = in_processes([every[name] for name in wanted], measure, options.seconds, options.workers)
    for row in track(found, "models", total=len(wanted)):
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
    return rows(file)


def in_processes(given: list[Row], measure: Callable[[Row], Row], limit: float, workers: int) -> Iterator[Row]:
    """The rows as they come, each measured in a process of its own that is ended after ``limit`` seconds."""
    waiting, running = given[::-1], dict[Connection, tuple[Row, BaseProcess, float]]()
    while waiting or running:
        while waiting and len(running) < workers:
            row = waiting.pop()
            receiver, sender = multiprocessing.Pipe(duplex=False)
            process = multiprocessing.get_context("fork").Process(target=_send, args=(sender, measure, row))
            process.start()
            # Of the pipe's end that the process has there is no other: what it never sends is then seen as its end.
            sender.close()
            running[receiver] = row, process, time.monotonic() + limit
        first = min(deadline for _, _, deadline in running.values())
        ready = wait(list(running), max(0.0, first - time.monotonic()))
        for receiver, (row, process, deadline) in list(running.items()):
            if receiver not in ready and time.monotonic() < deadline:
                continue
            late = row | {"status": "time limit", "reason": f"no result after {limit:.0f} s"}
            found = _received(receiver, row) if receiver in ready else late
            process.kill()
            process.join()
            del running[receiver]
            yield found


def _send(sender: Connection, measure: Callable[[Row], Row], row: Row) -> None:
    sender.send(measure(row))


def _received(receiver: Connection, row: Row) -> Row:
    try:
        found: Row = receiver.recv()
    except EOFError:
        return row | {"status": "failed", "reason": "the process ended without a result"}
    return found


def cell(route: Row) -> str:
    """What one route made of a model."""
    if route["status"] in ("exact", "wrong"):
        adds, sublayers = (", ".join(map(str, route[what])) for what in ("adds", "sublayers"))
        counts = adds if adds == sublayers else f"{adds} adds, {sublayers} sublayers"
        return f"{route['status']} ({counts}): {route['error']:.0e}"
    return f"{route['status']}: {short(route['reason'])}"


def short(reason: str) -> str:
    """The reason and the place in one line, without this installation's path."""
    lines = [line.strip() for line in reason.splitlines()]
    line = next((line for line in lines if line.startswith("refused:")), lines[0]).removeprefix("refused: ")
    line = re.sub(r"/\S*/site-packages/(transformers/)?", "", line)
    return re.sub(r"(\.py:\d+): .*", r"\1", line).replace("|", "/")[:240]


def record(path: Path, content: Row) -> None:
    """Write JSON without this installation's paths."""
    path.write_text(re.sub(r"/[^\s\"()]*/(site-packages|python\d[.\d]*)/", "", json.dumps(content, indent=0)) + "\n")


def seconds(row: Row) -> str:
    """What both routes took."""
    return f"{row['live']['seconds']:.1f}, {row['graph']['seconds']:.1f}"


def rows(path: Path) -> dict[str, Row]:
    """The rows so far; of several with one name the last."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}
