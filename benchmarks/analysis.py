"""How long the analysis takes beside the capture, and how it grows with depth.

Run ``python benchmarks/analysis.py`` (about five minutes on two cores): prints a markdown table and writes JSON
beside it. Every depth is captured once; the analysis, which is short, is the median of several runs on copies of the
captured graph, taken in the same process.
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

from attnres_compile.capture.inputs import normalise
from attnres_compile.capture.trace import capture
from attnres_compile.config import AttnResConfig
from attnres_compile.passes.base import Subject, run
from attnres_compile.passes.pipelines import live

DEPTHS = (12, 48, 96, 192)
REPEATS = 5


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


def measure(layers: int) -> dict[str, Any]:
    """Seconds of capture and analysis, and the share of the analysis in per cent."""
    model = llama(layers)
    inputs = normalise(model, torch.arange(16).reshape(2, 8) + 3)
    begin = time.perf_counter()
    captured = capture(model, inputs)
    capture_seconds = time.perf_counter() - begin
    seconds = []
    for _ in range(REPEATS):
        graph = fx.GraphModule(captured.module, copy.deepcopy(captured.module.graph))
        begin = time.perf_counter()
        subject = run(live(outermost=True), Subject(graph, AttnResConfig()))
        seconds.append(time.perf_counter() - begin)
        assert [len(chain.pushes) for chain in subject.chains] == [2 * layers]
    analysis_seconds = statistics.median(seconds)
    return {
        "layers": layers,
        "nodes": len(captured.module.graph.nodes),
        "capture_s": round(capture_seconds, 2),
        "analysis_s": round(analysis_seconds, 3),
        "share_percent": round(100 * analysis_seconds / capture_seconds, 2),
        "ms_per_layer": round(1000 * analysis_seconds / layers, 2),
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
