"""How long the passes take beside the capture, and how they grow with depth.

Run ``python benchmarks/analysis.py`` (about a quarter of an hour on two cores): prints a markdown table and writes JSON
beside it. Every depth is captured twice: the original, whose graph is analysed, and the transformed model, whose graph
gets the passes of the backend. Both are short, and medians of several runs on copies of the graph, in the same process.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

import attnres_compile as ac
from attnres_compile.capture.inputs import normalise
from attnres_compile.capture.trace import capture
from attnres_compile.config import AttnResConfig
from attnres_compile.passes.base import Pass, Subject, run
from attnres_compile.passes.pipelines import OPTIMIZE, live

DEPTHS = (12, 48, 96, 192, 500)
REPEATS = 5
EXAMPLE = torch.arange(16).reshape(2, 8) + 3


def llama(layers: int) -> nn.Module:
    """A narrow Llama of this many layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def captured(model: nn.Module) -> tuple[fx.GraphModule, float]:
    """The graph of a model, and the seconds that it took."""
    inputs = normalise(model, EXAMPLE)
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


def measure(layers: int) -> dict[str, Any]:
    """Seconds of capture, analysis and passes, and their shares of the capture in per cent."""
    model = llama(layers)
    original, original_seconds = captured(model)
    analysis, subject = seconds(live(outermost=True), original)
    assert [len(chain.pushes) for chain in subject.chains] == [2 * layers]
    transformed, transformed_seconds = captured(ac.transform(model, EXAMPLE, verify="off"))
    passes, subject = seconds(OPTIMIZE, transformed)
    targets = [node.target for node in subject.module.graph.nodes]
    assert torch.ops.attnres_compile.add_merge_norm.default in targets
    return {
        "layers": layers,
        "nodes": len(original.graph.nodes),
        "capture_s": round(original_seconds, 2),
        "analysis_s": round(analysis, 3),
        "analysis_percent": round(100 * analysis / original_seconds, 2),
        "analysis_ms_per_layer": round(1000 * analysis / layers, 2),
        "passes_s": round(passes, 3),
        "passes_percent": round(100 * passes / transformed_seconds, 2),
        "passes_ms_per_layer": round(1000 * passes / layers, 2),
    }


def main() -> None:
    """Measure every depth, print the table, write the JSON."""
    torch.set_num_threads(1)
    rows = [measure(layers) for layers in DEPTHS]
    print("| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    Path(__file__).with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
