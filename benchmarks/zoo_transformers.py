"""Every architecture of transformers that a small config and random weights can make, through both routes.

Run ``python benchmarks/zoo_transformers.py`` from the repository root. One row an architecture: its causal language
model, or else the sequence-to-sequence, masked or base model of transformers' auto mappings. Each is measured in a
process of its own with a time limit. Rows are appended to ``benchmarks/zoo-transformers.jsonl`` as they come, and a
later run goes on where the file ends; ``--limit`` stops after so many, names make a part again, ``--table`` only
writes ``docs/zoo-transformers.md``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from attnres_compile.capture.inputs import Inputs

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.example_inputs import example  # noqa: E402 - found through the line before
from benchmarks.small_configs import FORMS, shrunk  # noqa: E402
from benchmarks.zoo_coverage import coverage  # noqa: E402
from benchmarks.zoo_rows import Row, cell, go_on, measured, moved, record, seconds, short  # noqa: E402

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
    for sizes in FORMS:
        try:
            made = made_from(getattr(transformers, model), shrunk(CONFIG_MAPPING[name](), sizes))
            return made, example(made)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
    raise ValueError(" || ".join(problems))


def made_from(kind: Any, config: Any) -> nn.Module:
    """A model of this class with random parameters, moved away from zeros and ones."""
    if kind.config_class is not None and not isinstance(config, kind.config_class):
        parts = [getattr(config, part) for part in getattr(config, "sub_configs", {})]
        config = next((part for part in parts if isinstance(part, kind.config_class)), config)
    if "LMHead" in kind.__name__ and hasattr(config, "is_decoder"):
        config.is_decoder = True
    with torch.device("meta"), contextlib.suppress(NotImplementedError, RuntimeError):
        if (numbers := sum(parameter.numel() for parameter in kind(config).parameters())) > LARGEST:
            raise ValueError(f"no small form: {numbers / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    return moved(kind(config))


def measure(row: Row) -> Row:
    """The row of one architecture."""
    return measured(row, lambda: build(row["name"], row["model"]))


def main() -> None:
    """Measure what has no row yet, then write the table."""
    every: dict[str, Row] = {name: {"name": name, "model": model} for name, model in architectures().items()}
    write(list(go_on(__doc__, every, ROWS, measure).values()))


def write(found: list[Row]) -> None:
    """The table, the counts, and the rows as JSON."""
    counts = Counter(row["status"] for row in found)
    summary = "\n".join(f"| {status} | {count} |" for status, count in counts.most_common())
    compared = [row for row in found if "live" in row]
    lines = [
        f"| {row['name']} | {row['model']} | {cell(row['live'])} | {cell(row['graph'])} | {seconds(row)} |"
        for row in sorted(compared, key=lambda row: (row["status"], row["name"]))
    ]
    unbuilt = "\n".join(
        f"- {row['name']}: {short(row['reason'])}" for row in found if row["status"] in ("not built", "time limit")
    )
    TABLE.write_text(
        HEADER + summary + COVERAGE + coverage(found) + COLUMNS + "\n".join(lines) + UNBUILT + unbuilt + "\n"
    )
    record(RECORD, {"counts": counts, "rows": found})


if __name__ == "__main__":
    main()
