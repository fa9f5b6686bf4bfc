"""The operators' speed, as a share of what ``copy_`` reaches in the same run.

``python benchmarks/ops.py`` (two minutes on two cores; ``--device cuda`` on a GPU, sized for four minutes) writes
``ops-<device>.json`` and ``ops-<device>.md`` beside itself. All forms of a group run in turn, several rounds; figures
are medians. A group's minimum traffic (each input read once, each result written once) over the time gives its
bandwidth. Peers are measured where they import: fla-core, liger-kernel.

glibc gives large blocks back to the system, so that each new tensor costs a page fault for every page. On the CPU the
script therefore runs with glibc told to keep memory, as allocators that PyTorch recommends do (and as its own does on
a GPU); with ``--fresh`` it does not, and writes ``ops-cpu-fresh``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnres_compile.ops import add_merge_norm, depth_attention, factored, inter_block, merge, reference

EPS = 1e-6
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 28)}
Run = Callable[[], Any]


@dataclass(frozen=True)
class Size:
    """Sources, tokens, features, and reads per block."""

    sources: int
    tokens: int
    width: int
    dtype: torch.dtype
    reads: int = 4


class Inputs:
    """Random sources, and the parameters of the reads."""

    def __init__(self, size: Size, device: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, size.dtype)

        self.sources = [normal(size.tokens, size.width).requires_grad_() for _ in range(size.sources)]
        self.queries = (normal(size.reads, size.width) * 2 / size.width**0.5).requires_grad_()
        self.norms = (1 + normal(size.reads, size.width) / 4).requires_grad_()
        self.weight = (1 + normal(size.width) / 4).requires_grad_()
        self.grad = normal(size.tokens, size.width)
        with torch.no_grad():
            o, m, l = inter_block(self.sources[:-1], self.queries, self.norms, EPS)
        self.statistics = [value[0].clone() for value in (o, m, l)]
        self.bytes = self.sources[0].numel() * self.sources[0].element_size()

    def leaves(self) -> list[Tensor]:
        """What gradients are asked for."""
        return [*self.sources, self.queries, self.norms]


def with_backward(read: Callable[[], Tensor], inputs: Inputs) -> Run:
    """A read and the gradients of everything that it depends on."""
    return lambda: torch.autograd.grad(read(), inputs.leaves(), inputs.grad, allow_unused=True)


def no_grad(function: Run) -> Run:
    """The forward alone."""

    def call() -> Any:
        with torch.no_grad():
            return function()

    return call


def factored_read(inputs: Inputs) -> Tensor:
    """The kernels in plain PyTorch: what runs where no other kernel does, and what Inductor compiles well."""
    key = inputs.queries[0].to(factored.compute_dtype(inputs.grad.dtype)) * inputs.norms[0]
    return factored.depth_attention(inputs.sources, key, EPS, 1.0)


def reads(inputs: Inputs) -> dict[str, Callable[[], Tensor]]:
    """Every way to compute one read."""
    query, norm = partial(inputs.queries.__getitem__, 0), partial(inputs.norms.__getitem__, 0)
    compiled = torch.compile(reference.depth_attention)
    compiled_factored = torch.compile(factored_read)
    found: dict[str, Callable[[], Tensor]] = {
        "attnres_compile": lambda: depth_attention(inputs.sources, query(), norm(), EPS, 1.0),
        "factored, eager": lambda: factored_read(inputs),
        "factored, torch.compile": lambda: compiled_factored(inputs),
        "equations, eager": lambda: reference.depth_attention(inputs.sources, query(), norm(), eps=EPS),
        "equations, torch.compile": lambda: compiled(inputs.sources, query(), norm(), eps=EPS),
    }
    return found | peers(inputs)


def peers(inputs: Inputs) -> dict[str, Callable[[], Tensor]]:
    """Other libraries' reads, where they import and run on this device."""
    found: dict[str, Callable[[], Tensor]] = {}
    cuda = inputs.grad.is_cuda
    try:
        from fla.ops.attnres import fused_attnres, naive_attnres

        function = fused_attnres if cuda else naive_attnres
        name = f"fla-core {'fused' if cuda else 'naive'}"
        batched = [source.unsqueeze(0) for source in inputs.sources]
        found[name] = lambda: function(inputs.queries[0], batched, inputs.norms[0], rms_eps=EPS)[0]
    except ImportError:
        pass
    if cuda:
        try:
            from liger_kernel.ops.attn_res import LigerAttnResFunction

            def liger() -> Tensor:
                stack = torch.stack(inputs.sources).unsqueeze(1)
                result: Tensor = LigerAttnResFunction.apply(stack, inputs.queries[0], inputs.norms[0], EPS)[0]
                return result

            found["liger-kernel"] = liger
        except ImportError:
            pass
    return found


def phases(inputs: Inputs, reads: int) -> dict[str, tuple[Run, int]]:
    """The two phases and the fused operator, each with its minimum traffic in full-size tensors."""
    o, m, l = inputs.statistics
    blocks, last = inputs.sources[:-1], inputs.sources[-1]
    query, norm = inputs.queries[0].detach(), inputs.norms[0].detach()
    sums = o.element_size() // last.element_size()
    fused = partial(add_merge_norm, last, inputs.grad, blocks, o, m, l, query, norm, inputs.weight, None)
    return {
        f"inter_block, S = {reads}": (
            lambda: inter_block(inputs.sources, inputs.queries, inputs.norms, EPS),
            len(inputs.sources) + reads * sums,
        ),
        "merge": (lambda: merge(o, m, l, last, query, norm, EPS, 2.0), 2 + sums),
        "add_merge_norm": (lambda: fused(EPS, EPS, 2.0, "rms"), 4 + sums),
    }


def measure(forms: dict[str, Run], rounds: int, device: str) -> dict[str, float]:
    """Median seconds of each form; the forms take turns."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(rounds + 1):
        for name, form in forms.items():
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            form()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def compare(size: Size, device: str, rounds: int, slow: bool) -> list[dict[str, Any]]:
    """All groups at one size."""
    inputs = Inputs(size, device)
    target = torch.empty(size.sources * inputs.sources[0].numel(), dtype=size.dtype, device=device)
    origin = torch.randn_like(target)
    copy, copied = {"copy_": lambda: target.copy_(origin)}, 2 * size.sources
    n, forward, table = size.sources, reads(inputs), []
    if not slow:
        forward = {name: form for name, form in forward.items() if name.startswith(("attnres", "factored"))}
    groups: dict[str, dict[str, tuple[Run, int]]] = {
        "read": {name: (no_grad(form), n + 1) for name, form in forward.items()},
        "read, forward and backward": {
            name: (with_backward(form, inputs), (n + 1) + (2 * n + 1)) for name, form in forward.items()
        },
        "phases": {
            "one read": (no_grad(forward["attnres_compile"]), n + 1),
            **{name: (no_grad(form), units) for name, (form, units) in phases(inputs, size.reads).items()},
        },
    }
    for group, forms in groups.items():
        seconds = measure(copy | {name: form for name, (form, _) in forms.items()}, rounds, device)
        speed = copied * inputs.bytes / seconds["copy_"]
        for name, (_, units) in forms.items():
            reached = units * inputs.bytes / seconds[name]
            table.append(
                {
                    "size": f"{n} × {size.tokens} × {size.width} {str(size.dtype)[6:]}",
                    "group": group,
                    "form": name,
                    "ms": round(seconds[name] * 1e3, 3),
                    "GB/s": round(reached / 1e9, 2),
                    "of copy_": round(reached / speed, 3),
                }
            )
            print("{size:26} {group:27} {form:26} {ms:9.3f} ms {of copy_:7.1%}".format(**table[-1]), flush=True)
    return table


def main() -> None:
    """Measure and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=0, help="default: 15, on a GPU 30")
    parser.add_argument("--quick", action="store_true", help="this library's forms alone")
    parser.add_argument("--fresh", action="store_true", help="leave the allocator as it is")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    if not cuda and not options.fresh and not KEEP_MEMORY.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})
    if cuda:
        sizes = [Size(9, 8192, width, torch.bfloat16) for width in (1024, 4096, 7168)]
        hardware = torch.cuda.get_device_name()
    else:
        sizes = [Size(9, 2048, 1024, dtype) for dtype in (torch.float32, torch.bfloat16)]
        hardware = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    rounds = options.rounds or (30 if cuda else 15)
    rows = [row for size in sizes for row in compare(size, options.device, rounds, not options.quick)]
    stem = Path(__file__).with_name(f"ops-{options.device}{'-fresh' if options.fresh else ''}")
    stem.with_suffix(".json").write_text(json.dumps({"hardware": hardware, "rows": rows}, indent=1) + "\n")
    lines = [
        f"Medians of {rounds} rounds, {hardware}.",
        "",
        "| sources × tokens × d | group | form | ms | of `copy_` |",
    ]
    lines += ["| --- | --- | --- | --- | --- |"]
    lines += ["| {size} | {group} | {form} | {ms} | {of copy_:.0%} |".format(**row) for row in rows]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
