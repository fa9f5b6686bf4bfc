"""What ``transform`` itself takes: time beside ``torch.export`` alone, memory beside the model's own.

Run ``python benchmarks/transform.py`` from the repository root (``time`` or ``memory`` for a part); figures go to
``benchmarks/transform.json``. Time is that of a small-width Llama of 96 layers with the quick verification, exports and
transformations in turn. Memory is the peak resident size while a model of SmolLM2-135M's shape is transformed, over
what the process had before the model was made.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnres_compile as ac
from attnres_compile.capture.copies import shared_copy
from attnres_compile.capture.inputs import normalise

RECORD = Path(__file__).parent / "transform.json"
ROUNDS = 2
SMALL = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
SMOLLM2 = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}


def llama(**sizes: Any) -> LlamaForCausalLM:
    """A Llama with random weights."""
    torch.manual_seed(0)
    model: LlamaForCausalLM = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    return model


def export(model: torch.nn.Module) -> None:
    """What ``transform`` cannot do without."""
    inputs = normalise(model, None)
    torch.export.export(shared_copy(model), inputs.args, inputs.kwargs, strict=False)


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    gc.collect()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def times(layers: int) -> dict[str, Any]:
    """Seconds of both, in turn after a first of each."""
    warm, model = llama(**SMALL, **HEADS, num_hidden_layers=2), llama(**SMALL, **HEADS, num_hidden_layers=layers)
    export(warm)
    ac.transform(warm, verify="quick", num_blocks=2)
    exports, transforms = [], []
    for _ in range(ROUNDS):
        exports.append(timed(lambda: export(model)))
        transforms.append(timed(lambda: ac.transform(model, verify="quick")))
    ratio = statistics.median(transforms) / statistics.median(exports)
    return {
        "layers": layers,
        "export s": rounded(exports),
        "transform s": rounded(transforms),
        "ratio": round(ratio, 3),
    }


def memory(verify: Any) -> dict[str, Any]:
    """Megabytes of the model and of the peak while it is transformed."""
    ac.transform(llama(**SMALL, **HEADS, num_hidden_layers=2), verify=verify, num_blocks=2)
    gc.collect()
    before = resident("VmRSS")
    model = llama(**SMOLLM2, **SMOLLM2_HEADS)
    gc.collect()
    own = sum(parameter.nbytes for parameter in model.parameters()) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    ac.transform(model, verify=verify)
    peak = resident("VmHWM") - before
    return {"verify": verify, "model MB": round(own), "peak MB": round(peak), "ratio": round(peak / own, 3)}


def resident(field: str) -> float:
    """Megabytes of this process, now or at the peak."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) / 1024


def rounded(values: list[float]) -> list[float]:
    """To hundredths."""
    return [round(value, 2) for value in values]


def main() -> None:
    """Each measurement in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    # Not a default list, which argparse would look for among the choices.
    parser.add_argument("what", nargs="?", choices=["time", "memory"], help="both where nothing is named")
    what = parser.parse_args().what
    wanted = [what] if what else ["time", "memory"]
    results: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    results["torch"] = torch.__version__
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        if "time" in wanted:
            results["time"] = pool.apply(times, (96,))
        if "memory" in wanted:
            results["memory"] = [pool.apply(memory, (verify,)) for verify in ("quick", "full")]
    print(json.dumps(results, indent=1))
    RECORD.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
