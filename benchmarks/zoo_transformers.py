"""Every architecture of transformers that a small config and random weights can make, through both routes.

Run ``python benchmarks/zoo_transformers.py`` from the repository root. One row an architecture: its causal language
model, or else the sequence-to-sequence, masked or base model of transformers' auto mappings. Each is measured in a
process of its own with a time limit. Rows are appended to ``benchmarks/zoo-transformers.jsonl`` as they come, and a
later run goes on where the file ends; ``--limit`` stops after so many, names make a part again, ``--table`` only
writes ``docs/zoo-transformers.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import torch
import transformers
from rich.progress import track
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import attnres_compile as ac
from attnres_compile.capture.copies import shared_copy
from attnres_compile.capture.inputs import Inputs, other_shapes
from attnres_compile.verification import call, relative_error

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.example_inputs import example  # noqa: E402 - found through the line before
from benchmarks.small_configs import shrunk  # noqa: E402
from benchmarks.zoo_coverage import coverage  # noqa: E402

ROWS = ROOT / "benchmarks" / "zoo-transformers.jsonl"
TABLE = ROOT / "docs" / "zoo-transformers.md"
KINDS = (
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_TEXT_ENCODING",
    "MODEL_FOR_IMAGE_CLASSIFICATION",
    "MODEL",
)
RECORD = ROOT / "benchmarks" / "zoo-transformers.json"
TOLERANCE = 1e-5
HEADER = """# Every architecture of transformers

One row for each architecture of transformers {version} for which a small config (two layers, random weights, nothing
downloaded) can be made by the names of its sizes. *live* is the transformed module, compared at two shapes; *graph* the
rewritten exported program. In brackets the adds of each chain, all of which the running model was seen to push; then
the largest relative error of any output in fp32 with zero queries, `block_size=3`. Written by
`python benchmarks/zoo_transformers.py`, which goes on where it was stopped: the table has the rows of so far.

| outcome | architectures |
| --- | --- |
""".replace("{version}", transformers.__version__)
COVERAGE = """

## Coverage

"""
COLUMNS = """
## Rows

| architecture | model | live | graph | seconds |
| --- | --- | --- | --- | --- |
"""
UNBUILT = """

Not built: the default config has no small form by names alone, needs another library, or no example input was made.

"""
LARGEST = 400_000_000  # parameters


def architectures() -> dict[str, str]:
    """The class that stands for each architecture."""
    found: dict[str, str] = {}
    for kind in KINDS:
        for name, value in getattr(modeling_auto, f"{kind}_MAPPING_NAMES").items():
            if name in CONFIG_MAPPING:
                found.setdefault(name, value if isinstance(value, str) else value[0])
    names: dict[str, str] = {}
    for name, model in found.items():
        # Of several names for one class the shortest is its own.
        if len(name) < len(names.get(model, name + " ")):
            names[model] = name
    return {name: model for name, model in found.items() if names[model] == name}


def build(name: str, model: str) -> tuple[nn.Module, Inputs]:
    """A small model with moved parameters, in eval mode, and a call that it takes.

    Raises:
        ValueError: there is none; with what was said to each try.
    """
    problems = []
    for widths in (True, False):
        try:
            made = made_from(getattr(transformers, model), shrunk(CONFIG_MAPPING[name](), widths=widths))
            return made, example(made)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
    raise ValueError(" || ".join(problems))


def made_from(kind: Any, config: Any) -> nn.Module:
    """A model of this class with random parameters, moved away from zeros and ones."""
    if kind.config_class is not None and not isinstance(config, kind.config_class):
        parts = [getattr(config, part) for part in getattr(config, "sub_configs", {})]
        config = next(part for part in parts if isinstance(part, kind.config_class))
    if "LMHead" in kind.__name__ and hasattr(config, "is_decoder"):
        config.is_decoder = True
    with torch.device("meta"), contextlib.suppress(NotImplementedError, RuntimeError):
        if (numbers := sum(parameter.numel() for parameter in kind(config).parameters())) > LARGEST:
            raise ValueError(f"no small form: {numbers / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    made: nn.Module = kind(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.is_floating_point():
                parameter.nan_to_num_(0.0).add_(torch.randn_like(parameter) * 0.05)
    return made


def measure(name: str, model: str) -> dict[str, Any]:
    """The row of one architecture."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    row: dict[str, Any] = {"name": name, "model": model}
    try:
        original, inputs = build(name, model)
    except Exception as error:
        return row | {"status": "not built", "reason": str(error)[:600]}
    row["live"] = _timed(lambda: live(original, inputs))
    if row["live"]["status"] == "not traced" and "input_ids" in inputs.kwargs:
        # Some make the mask themselves unless they are traced.
        inputs.kwargs["attention_mask"] = torch.ones_like(inputs.kwargs["input_ids"])
        row["live"] = _timed(lambda: live(original, inputs))
    row["graph"] = _timed(lambda: graph(original, inputs))
    states = [row[route]["status"] for route in ("live", "graph")]
    order = ("failed", "wrong", "exact", "refused", "refused by verification", "not traced")
    return row | {"status": next(state for state in order if state in states)}


def live(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Transform the module and compare at two shapes."""
    transformed = ac.transform(model, inputs.kwargs, block_size=3, verify="quick")
    report: Any = transformed.attnres_report
    worst = 0.0
    for shape in (inputs, *other_shapes(inputs)[:1]):
        try:
            with torch.no_grad():
                expected = call(shared_copy(model), shape)
        except Exception:  # not a shape of the model's
            continue
        with torch.no_grad():
            worst = max(worst, relative_error(call(shared_copy(transformed), shape), expected))
    return _described(report, worst)


def graph(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
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


def _described(report: Any, error: float) -> dict[str, Any]:
    return {
        "status": "exact" if error <= TOLERANCE else "wrong",
        "error": error,
        "adds": [chain.adds for chain in report.chains],
        "sublayers": [chain.sublayers for chain in report.chains],
        "uncovered": [f"{r.reason} ({r.where})"[:300] for r in report.refused],
    }


def _timed(run: Any) -> dict[str, Any]:
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


def in_process(name: str, model: str, limit: float) -> dict[str, Any]:
    """The row, measured in a process that is ended after ``limit`` seconds."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        sender.send(measure(name, model))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    row = {"name": name, "model": model, "status": "time limit", "reason": f"no result after {limit:.0f} s"}
    if receiver.poll(limit):
        try:
            row = receiver.recv()
        except EOFError:
            row |= {"status": "failed", "reason": "the process ended without a result"}
    process.kill()
    process.join()
    return row


def main() -> None:
    """Measure what has no row yet, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--limit", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    every = architectures()
    wanted = options.names or [name for name in every if name not in rows()]
    for name in track(wanted[: 0 if options.table else options.limit], "architectures"):
        row = in_process(name, every[name], options.seconds)
        with ROWS.open("a") as file:
            file.write(json.dumps(row) + "\n")
    write(list(rows().values()))


def write(found: list[dict[str, Any]]) -> None:
    """The table, the counts, and the rows as JSON."""
    counts = Counter(row["status"] for row in found)
    summary = "\n".join(f"| {status} | {count} |" for status, count in counts.most_common())
    measured = [row for row in found if "live" in row]
    lines = [
        f"| {row['name']} | {row['model']} | {cell(row['live'])} | {cell(row['graph'])} | {seconds(row)} |"
        for row in sorted(measured, key=lambda row: (row["status"], row["name"]))
    ]
    unbuilt = "\n".join(
        f"- {row['name']}: {short(row['reason'])}" for row in found if row["status"] in ("not built", "time limit")
    )
    TABLE.write_text(
        HEADER + summary + COVERAGE + coverage(found) + COLUMNS + "\n".join(lines) + UNBUILT + unbuilt + "\n"
    )
    RECORD.write_text(json.dumps({"counts": counts, "rows": found}, indent=0) + "\n")


def cell(route: dict[str, Any]) -> str:
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
    line = re.sub(r"/\S*/site-packages/transformers/", "", line)
    return re.sub(r"(\.py:\d+): .*", r"\1", line).replace("|", "/")[:240]


def seconds(row: dict[str, Any]) -> str:
    """What both routes took."""
    return f"{row['live']['seconds']:.1f}, {row['graph']['seconds']:.1f}"


def rows() -> dict[str, dict[str, Any]]:
    """The rows so far; of several with one name the last."""
    lines = ROWS.read_text().splitlines() if ROWS.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


if __name__ == "__main__":
    main()
