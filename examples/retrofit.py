"""SmolLM2-135M gets Attention Residuals and is trained a little further: does a pretrained model gain by them?

Equal steps on the same batches of prose and code for the original, the transformed model, and the transformed model's
reads alone; the last two at each learning rate of the reads. ``make model`` installs the weights.
Resumable: what is done is a JSON file.

``--check`` compares the losses at step 0 and trains nothing; ``--report`` prints the table of what is there.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1", TOKENIZERS_PARALLELISM="false")

import study_text
import torch
from demo import find_gguf
from torch import Tensor, nn

import attnres_compile as ac

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("original", "attnres", "reads alone")
RATES = (1e-3, 1e-4, 3e-5)  # of the reads
WINDOWS = 24  # of held-out code, and as many of prose
EQUAL = 1e-4  # nats per token, at step 0


@dataclass(frozen=True)
class Run:
    """One training."""

    kind: str
    seed: int
    steps: int = 20
    batch: int = 2
    length: int = 128
    lr: float = 2e-5
    read_lr: float = RATES[0]
    num_blocks: int = 8

    @property
    def name(self) -> str:
        rate = "" if self.kind == KINDS[0] else f"-lr{self.read_lr:g}"
        return f"{self.kind.replace(' ', '-')}{rate}-seed{self.seed}"


def pretrained() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = find_gguf()
    files: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **files)
    return model, AutoTokenizer.from_pretrained(gguf.parent, **files)


def made(run: Run, model: Any) -> nn.Module:
    if run.kind == "original":
        return model
    model = ac.transform(model, num_blocks=run.num_blocks, verify="quick", inplace=True)
    if run.kind == "reads alone":
        ac.trainable_parameters(model, "attnres")
    return model


def optimizer_of(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """Fine-tuning without decay: what differs is the stream alone."""
    groups: Any = model.parameters()
    if run.kind != "original":
        groups = ac.optimizer_groups(model, weight_decay=0.0, lr=run.lr, read_lr=run.read_lr)
    return torch.optim.AdamW(groups, lr=run.lr, weight_decay=0.0, betas=(0.9, 0.95), fused=True)


def tokens_of(tokenizer: Any, text: Tensor, length: int) -> Tensor:
    """A part of a text as windows ``[windows, length]``."""
    content = bytes(text.tolist()).decode("utf-8", errors="replace")
    ids: Tensor = tokenizer(content, return_tensors="pt")["input_ids"][0]
    return ids[: len(ids) // length * length].reshape(-1, length)


def data(run: Run, tokenizer: Any) -> dict[str, Tensor]:
    """Windows to train on, of this seed's own part of the text, and held-out ones."""
    text, count = study_text.load(), run.steps * run.batch
    # About four bytes a token, and as much again to be sure.
    need = 8 * count * run.length
    start = torch.randint(len(text.train) - need, (), generator=torch.Generator().manual_seed(run.seed)).item()
    train = tokens_of(tokenizer, text.train[start : start + need], run.length)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(run.seed))[:count]
    found = {"train": train[order]}
    for name in ("code", "prose"):
        windows = tokens_of(tokenizer, getattr(text, name)[:400_000], run.length)
        found[name] = windows[torch.linspace(0, len(windows) - 1, WINDOWS).long()]
    return found


@torch.no_grad()
def held_out(model: Any, windows: dict[str, Tensor], batch: int) -> dict[str, float]:
    """Nats per token."""
    model.eval()
    found = {
        name: statistics.mean(
            float(model(input_ids=part, labels=part, use_cache=False).loss) for part in windows[name].split(batch)
        )
        for name in ("code", "prose")
    }
    model.train()
    return found


def train(run: Run, results: Path) -> None:
    done = results / f"{run.name}.json"
    if done.exists():
        found = json.loads(done.read_text())["run"]
        if found != asdict(run):
            raise SystemExit(f"{done} is of another training: {found}, not {asdict(run)}; give another --output")
        return
    model, tokenizer = pretrained()
    windows = data(run, tokenizer)
    model = made(run, model)
    optimizer, began = optimizer_of(run, model), time.perf_counter()
    curve, losses = [{"step": 0, **held_out(model, windows, run.batch)}], []
    print(f"{run.name}: {curve[0]}", flush=True)
    for step in range(run.steps):
        part = windows["train"][step * run.batch : (step + 1) * run.batch]
        loss = model(input_ids=part, labels=part, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            full = group.setdefault("full_lr", group["lr"])
            warm = min(1.0, (step + 1) / 5)
            group["lr"] = full * warm * 0.5 * (1 + math.cos(math.pi * step / run.steps))
        optimizer.step()
        losses.append(round(float(loss.detach()), 4))
    curve.append({"step": run.steps, **held_out(model, windows, run.batch)})
    content = {"run": asdict(run), "curve": curve, "losses": losses, "seconds": round(time.perf_counter() - began)}
    results.mkdir(parents=True, exist_ok=True)
    partly = done.with_name(f".{done.name}.{os.getpid()}")
    partly.write_text(json.dumps(content) + "\n")
    partly.replace(done)
    print(f"{run.name}: {curve[-1]}, {content['seconds']} s", flush=True)


def check() -> None:
    """The transformed model's loss at step 0 is the original's."""
    run, (model, tokenizer) = Run("attnres", 0), pretrained()
    windows = {name: part[:4] for name, part in data(run, tokenizer).items()}
    before = held_out(model, windows, run.batch)
    after = held_out(made(run, model), windows, run.batch)
    difference = max(abs(after[name] - before[name]) for name in before)
    print(f"before {before}\nafter  {after}\nlargest difference {difference:.1e}")
    if difference > EQUAL:
        sys.exit(1)


def report(results: Path) -> None:
    found = [json.loads(file.read_text()) for file in sorted(results.glob("*.json"))]
    print("| trained | rate of reads | seeds | code, before | after | prose, before | after | change of their mean |")
    print("|" + " --- |" * 8)
    for kind, rate in sorted({rate_of(entry) for entry in found}, key=lambda key: (KINDS.index(key[0]), key[1])):
        runs = [entry["curve"] for entry in found if rate_of(entry) == (kind, rate)]
        columns = [spread([curve[at][name] for curve in runs]) for name in ("code", "prose") for at in (0, -1)]
        changes = [statistics.mean(curve[-1][n] - curve[0][n] for n in ("code", "prose")) for curve in runs]
        rates = f"{rate:g}" if rate else ""
        print(f"| {kind} | {rates} | {len(runs)} | {' | '.join(columns)} | {spread(changes, '+.4f')} |")


def rate_of(entry: dict[str, Any]) -> tuple[str, float]:
    run = entry["run"]
    return run["kind"], 0.0 if run["kind"] == KINDS[0] else run["read_lr"]


def spread(values: list[float], form: str = ".4f") -> str:
    mean = format(statistics.mean(values), form)
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=Run.steps)
    parser.add_argument("--read-lrs", type=float, nargs="+", default=RATES, help="learning rates of the reads")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "study" / "retrofit")
    given = parser.parse_args()
    if given.check:
        check()
        return
    if not given.report:
        for rate, seed, kind in itertools.product(given.read_lrs, range(given.seeds), KINDS):
            train(Run(kind, seed, given.steps, read_lr=RATES[0] if kind == KINDS[0] else rate), given.output)
    report(given.output)


if __name__ == "__main__":
    main()
