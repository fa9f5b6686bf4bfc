"""Peak memory of a forward and backward, as a ratio to the standard residual chain.

``python benchmarks/memory.py`` writes ``benchmarks/memory.json`` and prints a table. 24 sublayers (LayerNorm, linear,
GELU, linear, add; width 576, 4 times that inside) in 8 blocks, without checkpointing. LayerNorm, because PyTorch's own
RMSNorm on the CPU keeps its input twice, which would flatter the comparison. Every allocation of PyTorch's CPU
allocator counts, those inside operators too; parameters are there before and left out, their gradients are not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from attnres_compile.ops import add_merge_norm, depth_attention, inter_block, merge, merge_norm, reference

SUBLAYERS, BLOCKS, WIDTH, EPS = 24, 8, 576, 1e-6
R = TypeVar("R")


class Net(nn.Module):
    """The sublayers' parameters, and one pseudo-query and key-norm weight a read."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ParameterList(torch.ones(WIDTH, dtype=dtype) for _ in range(SUBLAYERS))
        self.outer = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH, dtype=dtype) for _ in range(SUBLAYERS))
        self.inner = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH, dtype=dtype) for _ in range(SUBLAYERS))
        self.query = nn.Parameter(torch.randn(SUBLAYERS, WIDTH, dtype=dtype) / WIDTH**0.5)
        self.key_norm = nn.Parameter(torch.ones(SUBLAYERS, WIDTH, dtype=dtype))

    def branch(self, i: int, x: Tensor) -> Tensor:
        """A sublayer after its norm."""
        result: Tensor = self.inner[i](F.gelu(self.outer[i](x)))
        return result

    def norm(self, i: int, x: Tensor) -> Tensor:
        """A sublayer's norm."""
        return F.layer_norm(x, (WIDTH,), self.norms[i], None, EPS)


def residual(net: Net, x: Tensor) -> Tensor:
    """The standard residual chain."""
    for i in range(SUBLAYERS):
        x = x + net.branch(i, net.norm(i, x))
    return x


def blocks_of(net: Net, x: Tensor, block: Callable[[list[Tensor], range], Tensor]) -> Tensor:
    """Block AttnRes: each block makes one more source, and the last read sees them all."""
    sources, size = [x], SUBLAYERS // BLOCKS
    for first in range(0, SUBLAYERS, size):
        sources.append(block(sources, range(first, first + size)))
    return depth_attention(sources, net.query[0], net.key_norm[0], EPS, float(len(sources)))


def stacked(net: Net, x: Tensor) -> Tensor:
    """Every read by the paper's equations, as they are usually written."""

    def block(sources: list[Tensor], rows: range) -> Tensor:
        partial: list[Tensor] = []
        for i in rows:
            values = [*sources, *partial]
            h = reference.depth_attention(values, net.query[i], net.key_norm[i], eps=EPS, scale=len(values))
            branch = net.branch(i, net.norm(i, h))
            partial = [partial[0] + branch] if partial else [branch]
        return partial[0]

    return blocks_of(net, x, block)


def two_phase(net: Net, x: Tensor) -> Tensor:
    """Phase 1 and merges, each followed by its norm."""

    def block(sources: list[Tensor], rows: range) -> Tensor:
        span = slice(rows.start, rows.stop)
        statistics = inter_block(sources, net.query[span], net.key_norm[span], EPS)
        partial: Tensor | None = None
        for i, o, m, l in zip(rows, *(value.unbind(0) for value in statistics), strict=True):
            count = float(len(sources) + (partial is not None))
            h = merge(o, m, l, partial, net.query[i], net.key_norm[i], EPS, count).to(x.dtype)
            branch = net.branch(i, net.norm(i, h))
            partial = branch if partial is None else partial + branch
        assert partial is not None
        return partial

    return blocks_of(net, x, block)


def fused(net: Net, x: Tensor) -> Tensor:
    """Phase 1, and each merge with the add before and the norm after it."""

    def block(sources: list[Tensor], rows: range) -> Tensor:
        span = slice(rows.start, rows.stop)
        statistics = inter_block(sources, net.query[span], net.key_norm[span], EPS)
        partial: Tensor | None = None
        branch: Tensor | None = None
        for i, o, m, l in zip(rows, *(value.unbind(0) for value in statistics), strict=True):
            weights = (net.query[i], net.key_norm[i], net.norms[i], None, EPS, EPS)
            if partial is None or branch is None:
                partial, branch = branch, None
                count = float(len(sources) + (partial is not None))
                normalised = merge_norm(sources, o, m, l, partial, *weights, count, "layer")
            else:
                count = float(len(sources) + 1)
                partial, normalised = add_merge_norm(partial, branch, sources, o, m, l, *weights, count, "layer")
            branch = net.branch(i, normalised)
        assert partial is not None and branch is not None
        return partial + branch

    return blocks_of(net, x, block)


FORMS = {"residual": residual, "stacked": stacked, "two-phase": two_phase, "fused": fused}


def peak(form: Callable[[Net, Tensor], Tensor], tokens: int, dtype: torch.dtype) -> tuple[int, Tensor]:
    """The peak of a form's forward and backward, and its output."""
    net = Net(dtype)
    x = torch.randn(1, tokens, WIDTH, dtype=dtype)

    def step() -> Tensor:
        output = form(net, x)
        output.sum().backward()
        return output.detach()

    return peak_bytes(step)


def peak_bytes(step: Callable[[], R]) -> tuple[int, R]:
    """Largest number of bytes allocated at once during a step beyond those at its start, and its result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = step()
    live = most = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most, result


def main() -> None:
    """Measure every form in fp32 and bf16."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    tokens = parser.parse_args().tokens
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        base, _ = peak(residual, tokens, dtype)
        exact: Tensor | None = None
        for name, form in FORMS.items():
            size, output = peak(form, tokens, dtype)
            exact = output if name == "stacked" else exact
            error = 0.0 if exact is None else float((output - exact).abs().max() / exact.abs().max())
            rows.append({"dtype": str(dtype)[6:], "form": name, "MB": round(size / 1e6, 1), "ratio": size / base})
            print(
                f"{str(dtype)[6:]:9} {name:10} {size / 1e6:8.1f} MB  {size / base:.3f}  error {error:.1e}", flush=True
            )
    Path(__file__).with_suffix(".json").write_text(json.dumps({"tokens": tokens, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
