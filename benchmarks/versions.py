"""The core of the tests on other versions of PyTorch and transformers, each in an environment of its own.

Run ``python benchmarks/versions.py`` (``make versions``) from the repository root. Environments are made under
``.venv-versions`` and kept; a pair that has a result is not run again unless it is named, such as ``2.12 5.24``.
Results go to ``benchmarks/versions.json`` and ``docs/versions.md``; the exit status is 1 when a test failed and the
fault is not a library's own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from rich.progress import track

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".venv-versions"
RECORD, TABLE = ROOT / "benchmarks" / "versions.json", ROOT / "docs" / "versions.md"
# torch, transformers
PAIRS = (("2.11", "5.24"), ("2.12", "5.24"), ("2.13", "5.24"), ("2.14.1", "5.24"), ("2.13", "5.0"))
# These follow from the versions under test.
FREE = ("torch", "triton", "transformers", "tokenizers", "huggingface-hub", "hf-xet", "accelerate", "peft", "typer")
NEEDED = ("pytest", "pytest-timeout", "hypothesis", "accelerate", "peft")
TESTS = (
    *(f"tests/test_{name}.py" for name in ("arithmetic", "stream", "interface", "interface_reads", "oracle_b")),
    *(f"tests/test_{name}.py" for name in ("attach", "placement", "graphs", "verification", "zoo_transform")),
    *(f"tests/{name}" for name in ("passes", "capture")),
    *(f"tests/integration/test_{name}.py" for name in ("compile_export", "generate")),
)
# Both routes and their agreement say what a version does to the models of the zoo; these take longer than all others.
SLOWER = "tests/test_zoo_transform.py::test_zero_queries_reproduce_the_model"
PYTEST = (
    *("-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", "-m", "not slow", "--deselect", SLOWER),
    *("-o", "filterwarnings=default", "-W", "ignore"),
)
LENGTH = (
    "tests/integration/test_compile_export.py::test_export_with_dynamic_shapes[llama]",
    "tests/test_zoo_transform.py::test_routes_agree[llama]",
)
WHY = "torch.export of this version turns down the original model too, for a guard on the length of its text"
# Tests that fail for what a library does to the original model, by version of PyTorch.
THEIRS = {(version, test): WHY for version in ("2.11", "2.12") for test in LENGTH}
HEADER = """# Versions

The core of the tests (the stream and its arithmetic, both routes, every pass, captures, `torch.compile` and
`torch.export` of transformed models, `generate`, the agreement of both routes for seven architectures of the zoo) in an
environment for each pair of versions, on {where}. Warnings of other libraries are no failures here.
Written by `make versions`; the whole suite runs on PyTorch {pinned}.

| PyTorch | transformers | passed | failed |
| --- | --- | --- | --- |
"""


def environment(torch: str, transformers: str) -> Path:
    """The Python of an environment with these versions, made if there is none."""
    folder = FOLDER / f"torch-{torch}-transformers-{transformers}"
    python, done = folder / "bin" / "python", folder / ".done"
    if done.exists():
        return python
    venv.create(folder, with_pip=True, clear=True)
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(line for line in pinned if line.partition("==")[0] not in FREE))
    install = [str(python), "-m", "pip", "install", "--quiet"]
    for wanted in (
        [exact("torch", torch)],
        ["-c", str(constraints), exact("transformers", transformers), *NEEDED, "-e", str(ROOT)],
    ):
        subprocess.run([*install, *wanted], check=True)
    done.touch()
    return python


def exact(package: str, version: str) -> str:
    """A requirement: ``2.11`` is any patch of it."""
    return f"{package}=={version}" if version.count(".") > 1 else f"{package}=={version}.*"


def run(torch: str, transformers: str, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """The result of one pair; with what it was ``before``, only what failed then is run, and what passes now counts."""
    try:
        python = environment(torch, transformers)
    except subprocess.CalledProcessError as error:
        return {"asked": [torch, transformers], "failed": [f"the environment could not be made: {error}"]}
    code = "import torch, transformers; print(torch.__version__, transformers.__version__)"
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, **offline}}
    found = subprocess.check_output([python, "-c", code], text=True, **options).split()
    log = FOLDER / f"torch-{torch}-transformers-{transformers}.log"
    with log.open("w") as file:
        tests = TESTS if before is None else before["failed"]
        subprocess.run([python, *PYTEST, *tests], stdout=file, stderr=subprocess.STDOUT, **options)
    output = log.read_text()
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?)", output[-300:])}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    seconds = re.search(r"in (\d+)\.\d+s", output[-300:])
    return {
        "asked": [torch, transformers],
        "torch": found[0],
        "transformers": found[1],
        "passed": counts.get("passed", 0) + (before["passed"] if before else 0),
        "failed": failed or ([] if counts.get("passed") else [output[-300:]]),
        "seconds": int(seconds.group(1)) if seconds else None,
    }


def main() -> int:
    """Run what has no result yet, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pair", nargs="*", help="versions of torch and of transformers: run these again")
    parser.add_argument("--limit", type=int, default=len(PAIRS), help="pairs in this run")
    parser.add_argument("--failed", action="store_true", help="run only what failed before")
    options = parser.parse_args()
    results = {tuple(row["asked"]): row for row in json.loads(RECORD.read_text())} if RECORD.exists() else {}
    wanted = [tuple(options.pair)] if options.pair else [pair for pair in PAIRS if pair not in results]
    for pair in track(wanted[: options.limit], "versions"):
        results[pair] = run(*pair, results.get(pair) if options.failed else None)
        write([results[pair] for pair in PAIRS if pair in results])
    return int(any(explained(row, test) == test for row in results.values() for test in row["failed"]))


def explained(row: dict[str, Any], test: str) -> str:
    """The test that failed, with the reason where the fault is a library's."""
    why = THEIRS.get((row["asked"][0], test))
    return f"{test}: {why}" if why else test


def write(rows: list[dict[str, Any]]) -> None:
    """The results as JSON and as a table."""
    RECORD.write_text(json.dumps(rows, indent=1) + "\n")
    lines = [
        f"| {row.get('torch', row['asked'][0])} | {row.get('transformers', row['asked'][1])} | {row.get('passed', 0)} "
        f"| {len(row['failed'])} |"
        for row in rows
    ]
    done = [tuple(row["asked"]) for row in rows]
    lines += [
        f"| {torch} | {transformers} | not run yet | |"
        for torch, transformers in PAIRS
        if (torch, transformers) not in done
    ]
    where = f"{platform.system()} {platform.machine()}, Python {sys.version_info[0]}.{sys.version_info[1]}"
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    failed = [
        f"- PyTorch {row['asked'][0]}, transformers {row['asked'][1]}: {explained(row, test)}"
        for row in rows
        for test in row["failed"]
    ]
    header = HEADER.format(where=where, pinned=pinned.group(1))
    TABLE.write_text("\n".join([header + "\n".join(lines), *(["", *failed] if failed else []), ""]))


if __name__ == "__main__":
    sys.exit(main())
