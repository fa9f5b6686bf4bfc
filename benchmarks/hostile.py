"""Thousands of random residual programs (``tests/hostile``) through every route, and what became of them.

Run ``python benchmarks/hostile.py`` from the repository root. Batches of 50 cases are drawn from seeds of their own and
appended to ``benchmarks/hostile.jsonl``; a later run goes on where the file ends. Then ``benchmarks/hostile.json`` and
``docs/hostile.md`` are written. The exit status is 1 when a case was wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from rich.progress import track

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.hostile import check  # noqa: E402 - found through the line before
from tests.hostile.programs import Program, programs  # noqa: E402

LINES, COUNTS, TABLE = ROOT / "benchmarks/hostile.jsonl", ROOT / "benchmarks/hostile.json", ROOT / "docs/hostile.md"
BATCH = 50
ROUTES: dict[str, check.Route] = {"graph": "graph", "live": "live", "export": "export"}
# Of every ten batches: tracing with torch.export takes ten times as long.
MIX = ("graph", "live", "graph", "graph", "live", "graph", "live", "graph", "graph", "export")

HEADER = """# Random residual programs

{cases} programs drawn by `tests/hostile/programs.py` from the seeds {first} to {last}, {batch} for each: forks, casts,
reshapes, aliases, in-place operations, shared and nested modules, constants, scales, several streams, norms in odd
places. *graph* rewrites the symbolic trace; *live* transforms the module (found through a symbolic trace, for speed)
and runs the quick verification; *export* is the same through `torch.export` with the full verification. Every
transformed program is compared with the original at zero queries and with `tests/hostile/reference.py` at random ones,
in fp64 to 1e-12 (1e-5 where it casts to fp32). A wrong number, an error that is none of ours, or a refusal by
verification alone counts as wrong. *no program* is one that PyTorch itself does not run. Written by
`python benchmarks/hostile.py`; `benchmarks/hostile.json` has the reasons in full.

| outcome | graph | live | export |
| --- | --- | --- | --- |
"""
SPLIT = "\n## By reason\n\n| outcome | graph | live | export |\n| --- | --- | --- | --- |\n"


def batch(number: int) -> dict[str, Any]:
    """The outcomes of one batch, and the shortest program of each that was wrong."""
    route, outcomes, wrong = ROUTES[MIX[number % len(MIX)]], Counter[str](), dict[str, str]()

    def judge(program: Program) -> None:
        try:
            outcomes[check.outcome(program, route)] += 1
        except Exception as error:  # whatever it is, it is recorded
            kind = f"WRONG {type(error).__name__}: {check.normalised(str(error))}"
            outcomes[kind] += 1
            wrong[kind] = min(wrong.get(kind, repr(program)), repr(program), key=len)

    quiet: dict[str, Any] = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
    seed(number)(settings(max_examples=BATCH, phases=[Phase.generate], **quiet)(given(programs())(judge)))()
    return {"seed": number, "route": route, "outcomes": outcomes, "wrong": wrong}


def main() -> int:
    """Run the batches that are missing, then write the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit", type=int, default=10_000, help="batches in this run")
    options = parser.parse_args()
    done = {line["seed"] for line in lines()}
    missing = [number for number in range(options.cases // BATCH) if number not in done]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        pending = [pool.submit(batch, number) for number in missing[: options.limit]]
        for future in track(as_completed(pending), "batches", total=len(pending)):
            with LINES.open("a") as file:
                file.write(json.dumps(future.result()) + "\n")
    return write(sorted(lines(), key=lambda line: line["seed"]))


def lines() -> Iterator[dict[str, Any]]:
    """The batches so far."""
    return map(json.loads, LINES.read_text().splitlines() if LINES.exists() else [])


def write(found: list[dict[str, Any]]) -> int:
    """The counts as JSON and as a table; how many kinds were wrong."""
    counts: dict[str, Counter[str]] = {route: Counter() for route in ROUTES}
    for line in found:
        counts[line["route"]].update(line["outcomes"])
    total = sum(counts.values(), Counter[str]())
    wrong = {kind: program for line in found for kind, program in line["wrong"].items()}
    seeds = [line["seed"] for line in found]
    record = {"cases": total.total(), "seeds": [min(seeds), max(seeds)], "batch": BATCH, "counts": counts}
    COUNTS.write_text(json.dumps(record | {"wrong": wrong}, indent=1) + "\n")
    header = HEADER.format(cases=total.total(), first=min(seeds), last=max(seeds), batch=BATCH)
    sums = {route: collapsed(counts[route], outcome) for route in ROUTES}
    tables = [table(sums, ("equal", "refused", "no program", "wrong"))]
    sums = {route: collapsed(counts[route], reason) for route in ROUTES}
    tables.append(table(sums, [kind for kind, _ in sum(sums.values(), Counter[str]()).most_common()]))
    TABLE.write_text(header + SPLIT.join(tables))
    return int(bool(wrong))


def collapsed(counts: Counter[str], name: Callable[[str], str]) -> Counter[str]:
    found = Counter[str]()
    for kind, number in counts.items():
        found[name(kind)] += number
    return found


def outcome(kind: str) -> str:
    if kind.startswith("WRONG"):
        return "wrong"
    return kind if kind == "equal" else "no program" if kind.startswith("no program") else "refused"


def reason(kind: str) -> str:
    """Without who reads, which tensor, and the rest of a message that is cut."""
    kind = re.sub(r"(one sublayer); it is read next by .*", r"\1", kind)
    kind = re.sub(r"(by an inplace operation).*", r"\1", kind)
    return re.sub(r"(in place) \((by an in-place `?)\w+`?( at …)?\)", r"\1", kind)


def table(sums: dict[str, Counter[str]], kinds: Iterable[str]) -> str:
    return "".join(f"| {kind} | " + " | ".join(str(sums[route][kind]) for route in ROUTES) + " |\n" for kind in kinds)


if __name__ == "__main__":
    sys.exit(main())
