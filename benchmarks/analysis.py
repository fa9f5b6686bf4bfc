"""How long the passes take beside the capture, and how they grow with depth.

Run ``python benchmarks/analysis.py`` (about a quarter of an hour on two cores): prints a markdown table and writes JSON
beside it. A Llama shows the share of the capture, a stack of MLPs, whose capture is quick, the growth to 1,000
sublayers. Every depth is captured twice: the original, whose graph is analysed, and the transformed model, whose graph
gets the passes of the backend. Both are short, and medians of several runs on copies of the graph, in the same process.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

import attnres_compile as ac
from attnres_compile.capture.inputs import normalise
from attnres_compile.capture.trace import capture
from attnres_compile.config import AttnResConfig
from attnres_compile.passes.base import Pass, Subject, run
from attnres_compile.passes.pipelines import OPTIMIZE, live

REPEATS = 5
TOKENS, VECTORS = torch.arange(16).reshape(2, 8) + 3, torch.ones(2, 8, 32)


def llama(sublayers: int) -> nn.Module:
    """A narrow Llama of half as many layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=sublayers // 2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


class MLP(nn.Module):
    """A sublayer with its norm and its residual add."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class MLPs(nn.Module):
    """A stack of sublayers, between two projections."""

    def __init__(self, sublayers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(32, 32), nn.Linear(32, 32)
        self.layers = nn.ModuleList(MLP() for _ in range(sublayers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


CASES: dict[str, tuple[Callable[[int], nn.Module], Tensor, tuple[int, ...]]] = {
    "Llama": (llama, TOKENS, (24, 96, 192, 384)),
    "MLPs": (MLPs, VECTORS, (125, 250, 500, 1000)),
}


def captured(model: nn.Module, example: Tensor) -> tuple[fx.GraphModule, float]:
    """The graph of a model, and the seconds that it took."""
    inputs = normalise(model, example)
    begin = time.perf_counter()
    found = capture(model, inputs)
    return found.module, time.perf_counter() - begin


def seconds(pipeline: tuple[Pass, ...], module: fx.GraphModule) -> tuple[float, Subject]:
    """Median seconds of the passes on copies of a graph, and the last result."""
    times = []
    for _ in range(REPEATS):
        subject = Subject(fx.GraphModule(module, copy.deepcopy(module.graph)), AttnResConfig())
        begin = time.perf_counter()
        run(pipeline, subject)
        times.append(time.perf_counter() - begin)
    return statistics.median(times), subject


def measure(name: str, sublayers: int) -> dict[str, Any]:
    """Seconds of capture, analysis and passes, and their shares of the capture in per cent."""
    build, example, _ = CASES[name]
    model = build(sublayers).eval()
    original, original_seconds = captured(model, example)
    analysis, subject = seconds(live(outermost=True), original)
    assert [len(chain.pushes) for chain in subject.chains] == [sublayers]
    transformed, transformed_seconds = captured(ac.transform(model, example, verify="off"), example)
    passes, subject = seconds(OPTIMIZE, transformed)
    targets = [node.target for node in subject.module.graph.nodes]
    assert torch.ops.attnres_compile.add_merge_norm.default in targets
    return {
        "model": name,
        "sublayers": sublayers,
        "nodes": len(original.graph.nodes),
        "capture_s": round(original_seconds, 2),
        "analysis_s": round(analysis, 3),
        "analysis_percent": round(100 * analysis / original_seconds, 2),
        "analysis_ms_per_sublayer": round(1000 * analysis / sublayers, 2),
        "passes_s": round(passes, 3),
        "passes_percent": round(100 * passes / transformed_seconds, 2),
        "passes_ms_per_sublayer": round(1000 * passes / sublayers, 2),
    }


def main() -> None:
    """Measure every depth, print the table, write the JSON."""
    torch.set_num_threads(1)
    rows = [measure(name, sublayers) for name, case in CASES.items() for sublayers in case[-1]]
    print("| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    Path(__file__).with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
