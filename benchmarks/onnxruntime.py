"""What depth attention costs in ONNX Runtime on the CPU: transformed over original, in one run.

``python benchmarks/onnxruntime.py`` (some minutes, most of it export; a word chooses a model by its name, e.g.
``SmolLM2``) writes ``onnxruntime.json`` and ``onnxruntime.md`` beside itself. Each model is exported as it is and, with
random queries, transformed, in both schedules and with every form of the functions' bodies. fp32, 256 tokens, eight
blocks.

The sessions take turns in random order and share one pool of threads: idle threads of a pool that spin would slow
down the others. Each turn runs twice, and the second run counts, so that no session finds another's weights in the
caches. A figure is the median of the rounds' ratios. Two sessions of one file differ by up to a tenth, by their luck
with memory: huge pages for large blocks make that less, all sessions are made anew several times and in random order,
and the original in a second session says what is left.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Not the folder of this file, where it would hide the library of its name.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).parent.parent))

import onnx
import onnxruntime
import torch

import attnres_compile as ac
from attnres_compile.exporters.onnx_functions import FORMS, function_proto
from benchmarks.overhead import MODELS, pair

LENGTH, LIVES, ROUNDS, THREADS = 256, 5, 5, 2
SCHEDULES: dict[str, Any] = {"two phases": "onnxruntime", "one phase": "tensorrt"}
# The original in another session: what its ratio is off 1 by, every ratio may be.
CONTROL = "original, again"
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def files(name: str, folder: Path) -> dict[str, Path]:
    """The original, and the transformed model in every schedule and form, by name."""
    folder.mkdir()
    original, transformed, inputs = pair(MODELS[name])
    ids = {"input_ids": inputs["input_ids"][:, :LENGTH]}
    paths = {"original": folder / "original.onnx"}
    ac.export_onnx(original, ids, paths["original"], atol=1e-3)
    paths[CONTROL] = paths["original"]
    for schedule, target in SCHEDULES.items():
        first, *others = (f"{schedule}, {form}" for form in FORMS)
        paths[first] = folder / f"{first}.onnx"
        ac.export_onnx(transformed, ids, paths[first], target=target, body=FORMS[0], atol=1e-3)
        proto = onnx.load(paths[first])
        names = [function.name for function in proto.functions]
        for other, form in zip(others, FORMS[1:], strict=True):
            del proto.functions[:]
            proto.functions.extend(function_proto(kind, 23, form) for kind in names)
            paths[other] = folder / f"{other}.onnx"
            onnx.save(proto, paths[other])
    return paths


def measure(name: str, paths: dict[str, Path]) -> list[dict[str, Any]]:
    """The rows of one model."""
    feeds = {"input_ids": torch.randint(500, (1, LENGTH)).numpy()}
    rounds = []
    for _ in range(LIVES):
        made = {name: session(path) for name, path in random.sample(list(paths.items()), len(paths))}
        sessions = [made[name] for name in paths]
        results = [torch.from_numpy(each.run(None, feeds)[0]) for each in sessions]
        for _ in range(ROUNDS):
            times = [0.0] * len(sessions)
            for i in random.sample(range(len(sessions)), len(sessions)):
                sessions[i].run(None, feeds)
                began = time.perf_counter()
                sessions[i].run(None, feeds)
                times[i] = time.perf_counter() - began
            rounds.append(times)
        del sessions, made
    base = round(statistics.median(times[0] for times in rounds) * 1e3, 1)
    rows = []
    for i, form in enumerate(list(paths)[1:], 1):
        ratio = statistics.median(times[i] / times[0] for times in rounds)
        apart = (results[i] - results[2]).abs().max() / results[2].abs().max()
        rows.append({"model": name, "form": form, "original ms": base, "ratio": round(ratio, 3)})
        rows[-1]["error"] = "" if form == CONTROL else f"{float(apart):.0e}"
    return rows


def main() -> None:
    """Measure the cases whose names hold all the words of the command line."""
    if not HUGE_PAGES.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **HUGE_PAGES})
    rows = []
    with TemporaryDirectory() as folder:
        chosen = [name for name in MODELS if all(word in name for word in sys.argv[1:])]
        paths = {name: files(name, Path(folder) / str(i)) for i, name in enumerate(chosen)}
        # After the exports, whose sessions have threads of their own.
        onnxruntime.set_global_thread_pool_sizes(THREADS, 1)
        for name in chosen:
            rows += measure(name, paths[name])
            for row in rows[-len(paths[name]) + 1 :]:
                print(row, flush=True)
    if sys.argv[1:]:
        return
    target = Path(__file__)
    target.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    write_table(target.with_suffix(".md"), rows)


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    head = "| model | schedule, body | original, ms | time, ratio | logits, apart from the first form's |"
    lines = [head, "| --- | --- | --- | --- | --- |"]
    lines += [f"| {r['model']} | {r['form']} | {r['original ms']} | {r['ratio']} | {r['error']} |" for r in rows]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
