"""Measure every model of the test zoo through both routes and write the table ``docs/zoo.md``.

Run ``python benchmarks/zoo.py`` from the repository root (about eight minutes on two cores); names make a part.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests import zoo_check
from tests.zoo import CASES

HEADER = """# The zoo, measured

Small random-weight models, 4 layers, no downloads. Zero queries against the original, largest relative error over
num_blocks=2, num_blocks=3 and block_size=1, over two batches and lengths (Mamba2's program has one length), in eval and
in training with equal seeds. Gradients are those of the original parameters. *live* is the transformed module, *graph*
the rewritten exported program. The pushes seen equal the adds found in each row. Written by `python benchmarks/zoo.py`;
`tests/test_zoo_transform.py` asserts the bounds: 1e-12 in fp64, 1e-5 in fp32. A model marked with * norms or computes
in fp32 inside, where the fp64 figure is bounded by fp32's.

| model | adds | sublayers | fp64 live | fp64 graph | fp64 gradients | fp32 live | fp32 graph | fp32 gradients |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def row(name: str) -> str:
    """One line of the table."""
    torch.set_num_threads(1)
    case = CASES[name]
    cells = [name + ("" if case.pure64 else " *")]
    figures: list[str] = []
    for dtype in (torch.float64, torch.float32):
        measured = zoo_check.measure(case, dtype)
        assert measured.pushes == measured.adds == case.adds, name

        def largest(words: tuple[str, ...], errors: dict[str, float] = measured.errors) -> str:
            return f"{max(error for what, error in errors.items() if all(word in what for word in words)):.0e}"

        figures += [largest(("live", "outputs")), largest(("graph", "outputs")), largest(("gradients",))]
    counts = (", ".join(str(n) for n in numbers) for numbers in (case.adds, case.sublayers))
    return "| " + " | ".join([*cells, *counts, *figures]) + " |"


def main() -> None:
    """Measure in two processes, print the rows as they come, write the table when all are asked for."""
    names = sys.argv[1:] or [name for name, case in CASES.items() if not case.refused]
    rows = []
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for line in pool.map(row, names):
            print(line, flush=True)
            rows.append(line)
    refused = ", ".join(name for name, case in CASES.items() if case.refused)
    if not sys.argv[1:]:
        ending = f"\n\nRefused, with the reason and the line in the model's source: {refused}.\n"
        Path("docs/zoo.md").write_text(HEADER + "\n".join(rows) + ending)


if __name__ == "__main__":
    main()
