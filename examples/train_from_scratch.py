"""Small deep language models of bytes, trained with and without Attention Residuals on the same batches.

``--quick`` trains two for some seconds and shows what they did; ``--study`` is the whole comparison (about an hour of
one core, resumable: finished runs are JSON files, unfinished ones go on from their last checkpoint); ``--report`` draws
what is there. Nothing is downloaded.
"""

import argparse
import json
import math
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import study_text
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.analysis import measure

ROOT = Path(__file__).resolve().parents[1]
HEAD = 32  # features of an attention head
EVALUATIONS, WINDOWS, LAST_WINDOWS = 6, 16, 256
CHECKPOINT_EVERY = 60.0  # seconds


@dataclass(frozen=True)
class Run:
    """One training. ``block_size`` is in sublayers, of which a layer has two; 0 is the standard residual stream."""

    block_size: int
    seed: int
    lr: float
    width: int = 128
    layers: int = 24
    steps: int = 500
    batch: int = 4
    length: int = 128

    @property
    def name(self) -> str:
        kind = f"S{self.block_size}" if self.block_size else "residual"
        return f"{kind}-d{self.width}-lr{self.lr:g}-seed{self.seed}"

    @property
    def label(self) -> str:
        if not self.block_size:
            return "residual"
        blocks = math.ceil(2 * self.layers / self.block_size)
        return "Full AttnRes" if self.block_size == 1 else f"Block AttnRes, N = {blocks}"


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    """Two linear layers with GELU between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x)))


class Layer(nn.Module):
    """Pre-norm attention, then a pre-norm MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.mlp_norm, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Bytes(nn.Module):
    """A transformer that predicts the next byte."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                # As GPT-2: what is added to the stream starts smaller in a deeper model.
                into_stream = name.endswith("out.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if into_stream else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def made(run: Run) -> nn.Module:
    """The model of a run; one seed makes the same weights with and without depth attention."""
    torch.manual_seed(run.seed)
    model = Bytes(run.width, run.layers, run.length)
    if not run.block_size:
        return model
    example = torch.zeros(2, run.length, dtype=torch.long)
    return ac.transform(model, example, block_size=run.block_size, verify="quick", inplace=True)


def optimizer_of(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if hasattr(model, "attnres"):
        groups = ac.optimizer_groups(model, weight_decay=0.1)
    else:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def rate(step: int, run: Run) -> float:
    """A warm-up over a twentieth of the steps, then a cosine down to a tenth."""
    warm = run.steps / 20
    if step < warm:
        return run.lr * (step + 1) / (warm + 1)
    return run.lr * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / (run.steps - warm)))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out(model: nn.Module, text: study_text.Text, run: Run, windows: int) -> dict[str, float]:
    """Nats per byte."""
    parts = {name: text.held_out(name, windows, run.length).split(run.batch) for name in ("code", "prose")}
    return {name: sum(float(loss_of(model, batch)) for batch in part) / len(part) for name, part in parts.items()}


def train(run: Run, results: Path) -> Path:
    """Train, unless that was done; returns the file with what came out."""
    done, checkpoint = results / f"{run.name}.json", ROOT / "build" / "study" / f"{run.name}.pt"
    if done.exists():
        found = json.loads(done.read_text())["run"]
        if found != asdict(run):
            raise SystemExit(f"{done} is of another training: {found}, not {asdict(run)}; give another --output")
        return done
    torch.set_num_threads(1)
    text, model = study_text.load(), made(run)
    optimizer = optimizer_of(model, run.lr)
    state: dict[str, Any] = {"step": 0, "curve": [], "losses": [], "seconds": 0.0}
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        if saved["run"] == asdict(run):
            state = saved["state"]
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
    # Processor time: what else runs on the machine, and a run that is paused, do not count.
    began, last = time.process_time() - state["seconds"], time.process_time()
    for step in range(state["step"], run.steps):
        if step % math.ceil(run.steps / EVALUATIONS) == 0:
            state["curve"].append({"step": step, **held_out(model, text, run, WINDOWS)})
        # A step's batch depends on the seed and the step alone: resuming needs no random state.
        generator = torch.Generator().manual_seed(1_000_003 * run.seed + step)
        loss = loss_of(model, text.batch(run.batch, run.length, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, run)
        optimizer.step()
        state["losses"].append(round(float(loss.detach()), 4))
        if time.process_time() - last > CHECKPOINT_EVERY:
            last = time.process_time()
            state |= {"step": step + 1, "seconds": last - began}
            saved = {
                "run": asdict(run),
                "state": state,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            save(checkpoint, partial(torch.save, saved))
            print(f"{run.name}: step {step + 1} of {run.steps}, loss {float(loss.detach()):.3f}", flush=True)
    seconds = time.process_time() - began
    state["curve"].append({"step": run.steps, **held_out(model, text, run, WINDOWS)})
    final = held_out(model, text, run, LAST_WINDOWS)
    content = {
        "run": asdict(run),
        "label": run.label,
        "held_out": final,
        "curve": state["curve"],
        "losses": state["losses"],
        "seconds": round(seconds),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "depth": depth(model, text, run),
    }
    save(done, lambda path: path.write_text(json.dumps(content) + "\n"))
    checkpoint.unlink(missing_ok=True)
    print(f"{run.name}: held-out {final['code']:.4f} code, {final['prose']:.4f} prose, {seconds:.0f} s", flush=True)
    return done


def depth(model: nn.Module, text: study_text.Text, run: Run) -> dict[str, Any]:
    """What the model does with its depth on held-out text; zero queries are how the standard stream is looked at."""
    windows = text.held_out("code", run.batch, run.length)
    if not run.block_size:
        model = ac.transform(model, windows[:, :-1], block_size=2 * run.layers, verify="off")
    loss = lambda logits: F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())  # noqa: E731
    return measure(model, windows[:, :-1], loss=loss).to_dict()


def save(path: Path, write: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partly = path.with_name(f".{path.name}.{os.getpid()}")
    write(partly)
    partly.replace(path)


def study(results: Path, workers: int, steps: int) -> None:
    """Tune the rate for the standard stream; compare at it, seed by seed; then other block sizes and other widths."""
    base = Run(0, 0, 2e-3, steps=steps)
    tuned = [replace(base, lr=lr) for lr in (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)]
    run_all(tuned, results, workers)
    best = min(tuned, key=lambda run: sum(json.loads((results / f"{run.name}.json").read_text())["held_out"].values()))
    print(f"learning rate {best.lr:g}, the best of {[run.lr for run in tuned]} for the standard stream", flush=True)
    runs = [replace(best, block_size=size, seed=seed) for seed in range(3) for size in (0, 6, 1)]
    runs += [replace(best, block_size=size) for size in (12, 2, 4, 2 * best.layers)]
    runs += [replace(best, width=width, block_size=size) for width in (64, 96) for size in (0, 6)]
    runs += [replace(best, block_size=12, seed=seed) for seed in (1, 2)]
    run_all(runs, results, workers)


def run_all(runs: list[Run], results: Path, workers: int) -> None:
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for _ in pool.map(partial(train, results=results), runs):
            pass


def quick(results: Path) -> None:
    """Two small models: they start equal, both learn, and the pictures come out."""
    base = Run(0, 0, 4e-3, width=64, layers=6, steps=40, batch=8, length=64)
    found = [json.loads(train(replace(base, block_size=size), results).read_text()) for size in (0, 3)]
    first, second = (entry["losses"] for entry in found)
    require(abs(first[0] - second[0]) < 1e-3, f"the first losses are equal: {first[0]} and {second[0]}")
    for entry in found:
        require(entry["losses"][-1] < 0.7 * entry["losses"][0], f"{entry['label']} learns: {entry['losses'][-1]}")


def require(condition: bool, fact: str) -> None:
    print(f"{'✓' if condition else '✗'} {fact}", flush=True)
    if not condition:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    for name in ("quick", "study", "report"):
        what.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--output", type=Path, help="default: docs/study, for --quick build/study-quick")
    parser.add_argument("--steps", type=int, default=Run.steps, help="of each training of the study")
    parser.add_argument("--workers", type=int, default=2, help="runs at once, of one thread each")
    given = parser.parse_args()
    output = given.output or ROOT / ("build/study-quick" if given.quick else "docs/study")
    if given.quick:
        for file in (output / "runs").glob("*.json"):
            file.unlink()
        quick(output / "runs")
    elif given.study:
        study(output / "runs", given.workers, given.steps)
    from study_report import report

    report(output)


if __name__ == "__main__":
    main()
