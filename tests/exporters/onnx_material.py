"""Models and helpers for the tests of `export_onnx`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnres_compile.ops import depth_attention, inter_block, merge, reference
from tests.tolerances import assert_close

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

EPS, WIDTH, VOCABULARY = 1e-6, 24, 31
F32, F16 = torch.float32, torch.float16
SHAPES = [(2, 5), (1, 1), (3, 9)]


class TwoPhase(nn.Module):
    """Block AttnRes as the library's graphs compute it: phase 1 when a block opens, phase 2 at each read."""

    def __init__(self, blocks: tuple[int, ...] = (2, 3, 1), *, key_norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = blocks
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.sublayers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(sum(blocks)))
        self.query = nn.Parameter(torch.randn(sum(blocks), WIDTH))
        self.key_norm = nn.Parameter(1 + 0.3 * torch.randn(sum(blocks), WIDTH)) if key_norm else None
        self.calls = 0

    def rows(self, index: int | slice) -> tuple[Tensor, Tensor | None]:
        return self.query[index], None if self.key_norm is None else self.key_norm[index]

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        hidden = source = self.embedding(tokens)
        closed, row = [source], 0
        for size in self.blocks:
            first = row == 0
            reads = slice(row - (not first), row + size - 1)
            statistics = []
            if reads.start < reads.stop:
                o, m, l = inter_block(closed, *self.rows(reads), EPS)
                statistics = list(zip(o.unbind(0), m.unbind(0), l.unbind(0), strict=True))
            if not first:
                hidden = merge(*statistics.pop(0), None, None, None, EPS, float(len(closed))).to(source.dtype)
            partial = self.sublayers[row](hidden)
            for read in statistics:
                hidden = merge(*read, partial, *self.rows(row), EPS, float(len(closed) + 1))
                row += 1
                partial = partial + self.sublayers[row](hidden)
            closed.append(partial)
            row += 1
        return depth_attention(closed, *self.rows(row - 1), EPS, float(len(closed)))

    def by_reference(self, tokens: Tensor) -> Tensor:
        """The same from the paper's equations: another path to the numbers."""
        with torch.no_grad():
            return reference.block_attnres(
                self.embedding(tokens),
                [layer for layer in self.sublayers if isinstance(layer, nn.Linear)],
                self.query,
                self.key_norm,
                self.blocks,
                eps=EPS,
                preserve=True,
            )


class Small(nn.Module):
    """One read of two sources."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.query = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> dict[str, Any]:
        branch = self.linear(x)
        return {"hidden": depth_attention([x, branch], self.query, None, EPS, 2.0), "branch": (branch, None)}


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(batch * 100 + length))


def session(model: Any, **options: Any) -> Any:
    """An ONNX Runtime session of a path or a ModelProto, without any library of custom operators."""
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    for name, value in options.items():
        setattr(settings, name, value)
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, settings, providers=["CPUExecutionProvider"])


def run(runtime: Any, *inputs: Tensor) -> list[Tensor]:
    names = [value.name for value in runtime.get_inputs()]
    feeds = {name: tensor.detach().numpy() for name, tensor in zip(names, inputs, strict=True)}
    return [torch.from_numpy(value) for value in runtime.run(None, feeds)]


def normal(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sources_of(count: int, *shape: int, dtype: torch.dtype = F32) -> list[Tensor]:
    return [normal(*shape, dtype=dtype, seed=i + 1) * (1 + i % 3) for i in range(count)]


def check(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert_close(a, e)
