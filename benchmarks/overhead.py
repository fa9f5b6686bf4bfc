"""What depth attention costs a whole model: transformed over original, in one run.

``python benchmarks/overhead.py`` (half an hour on two cores, most of it compilation; words choose cases by their name,
e.g. ``eager``) writes ``overhead.json`` and ``overhead.md`` beside itself. Compiled is ``torch.compile``, of the
transformed model with ``backend="attnres"``. The two models take turns; a figure is the median of the rounds' ratios.
Random queries, eight blocks, fp32. Memory is that of PyTorch's CPU allocator.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor, nn

import attnres_compile as ac
from benchmarks.memory import peak_bytes
from benchmarks.ops import KEEP_MEMORY

LENGTH, ROUNDS = 512, 31
NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
Step = Callable[[], Any]


def gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    """12 transformer blocks of width 512."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=512,
        bos_token_id=0,
        eos_token_id=0,
        n_positions=LENGTH,
        n_embd=512,
        n_layer=12,
        n_head=8,
        **NO_DROPOUT,
    )
    return GPT2LMHeadModel(config).eval(), {"input_ids": torch.randint(512, (1, LENGTH))}


def smol() -> tuple[nn.Module, dict[str, Tensor]]:
    """The shapes of SmolLM2-135M: 30 transformer blocks of width 576."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    config = LlamaConfig(**sizes, **heads)
    return LlamaForCausalLM(config).eval(), {"input_ids": torch.randint(1000, (1, LENGTH))}


MODELS = {"12 blocks, d 512": gpt, "SmolLM2-135M shapes": smol}


def inference(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    """A forward of the whole length, without a cache."""

    def step() -> Any:
        with torch.no_grad():
            return model(**inputs, use_cache=False)

    return step


def decoding(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    """One more token each time, after the whole length, with a static cache."""
    from transformers import StaticCache

    token = torch.ones(1, 1, dtype=torch.int64)
    cache = StaticCache(model.config, max_cache_len=LENGTH + 4 * ROUNDS)
    with torch.no_grad():
        model(input_ids=inputs["input_ids"], past_key_values=cache)

    def step() -> Any:
        with torch.no_grad():
            return model(input_ids=token, past_key_values=cache)

    return step


def training(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    """Forward, loss and backward."""

    def step() -> Any:
        model.zero_grad(set_to_none=True)
        model(**inputs, use_cache=False).logits.logsumexp(-1).mean().backward()

    return step


def checkpointed(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    """A training step that computes every layer anew in the backward."""
    found: Any = model.train()
    found.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return training(model, inputs)


STEPS = {"inference": inference, "training": training, "checkpointed training": checkpointed, "decoding": decoding}


def pair(build: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """A model, its transform with random queries, and their inputs."""
    original, inputs = build()
    model = ac.transform(original, inputs, verify="off")
    with torch.no_grad():
        for name, parameter in model.get_submodule("attnres").named_parameters():
            if name.endswith("query"):
                parameter.normal_(std=1 / parameter.shape[-1] ** 0.5)
    return original, model, inputs


def ratio(steps: list[Step]) -> tuple[float, float]:
    """The median of the rounds' ratios, and the original's median in ms."""
    for step in steps:
        step()
        step()
    rounds: list[list[float]] = []
    for _ in range(ROUNDS):
        times = []
        for step in steps:
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
        rounds.append(times)
    return statistics.median(b / a for a, b in rounds), statistics.median(a for a, _ in rounds) * 1e3


def cases() -> list[tuple[str, str, str]]:
    """Names of a model, a step and a mode."""
    found = [(m, s, mode) for m in MODELS for s in STEPS for mode in ("eager", "compiled")]
    return [case for case in found if case[1] != "decoding" or "SmolLM2" in case[0]]


def measure(model: str, step: str, mode: str) -> dict[str, Any]:
    """One row of the table."""
    torch._dynamo.reset()
    original, transformed, inputs = pair(MODELS[model])
    both = [original, transformed]
    if mode == "compiled":
        both = [torch.compile(original), torch.compile(transformed, backend="attnres")]
    steps = [STEPS[step](m, inputs) for m in both]
    overhead, base = ratio(steps)
    row: dict[str, Any] = {"model": model, "step": step, "mode": mode, "original ms": round(base, 1)}
    row["ratio"] = round(overhead, 3)
    if "training" in step:
        peaks = []
        for one in steps:
            # What a step releases of the one before would count against its peak.
            original.zero_grad(set_to_none=True)
            transformed.zero_grad(set_to_none=True)
            peaks.append(peak_bytes(one)[0])
        row["memory"] = round(peaks[1] / peaks[0], 3)
    return row


def main() -> None:
    """Measure the cases whose names hold all the words of the command line."""
    if not KEEP_MEMORY.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})
    rows = []
    for case in cases():
        if all(any(word in part for part in case) for word in sys.argv[1:]):
            rows.append(measure(*case))
            print(rows[-1], flush=True)
            if not sys.argv[1:]:
                write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    """The rows so far, as JSON and as a table."""
    target = Path(__file__)
    target.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    lines = [
        "| model | step | mode | original, ms | time, ratio | peak memory, ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {r['model']} | {r['step']} | {r['mode']} | {r['original ms']} | {r['ratio']} | {r.get('memory', '')} |"
        for r in rows
    ]
    target.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
