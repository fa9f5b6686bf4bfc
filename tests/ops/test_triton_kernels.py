import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attnres_compile.ops import factored
from attnres_compile.ops import triton as kernels
from tests.triton_process import run

PARTS = ["read", "phase_one", "phase_two or norm", "not read and not phase and not norm"]

FUNCTIONS = [
    "depth_attention",
    "depth_attention_backward",
    "inter_block",
    "inter_block_backward",
    "merge",
    "merge_backward",
    "add_merge_norm",
    "add_merge_norm_backward",
]
# Compute capability, dtype, d: every value of each, and the widest rows, whose registers are the scarcest, on all.
TARGETS = [
    (80, "bfloat16", 1024),
    (80, "float32", 8192),
    (90, "bfloat16", 7168),
    (100, "bfloat16", 8192),
    (120, "float32", 7168),
    (120, "bfloat16", 4096),
]

importable = pytest.mark.skipif(not kernels.available(), reason=kernels.reason())


@importable
@pytest.mark.parametrize("part", PARTS)
def test_numerics(part: str) -> None:
    file = "tests/ops/triton_numerics.py"
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", part, TRITON_INTERPRET="1")


@importable
@pytest.mark.parametrize("capability, dtype, d", TARGETS)
def test_compiled(capability: int, dtype: str, d: int, tmp_path: Path) -> None:
    calls = json.dumps([[capability, dtype, d, FUNCTIONS]])
    lines = run("-m", "tests.ops.triton_compile", calls, TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    # The backward of phase 1 has two kernels.
    assert [k["function"] for k in found] == sorted([*FUNCTIONS, "inter_block_backward"], key=FUNCTIONS.index)
    for kernel in found:
        print(kernel)
        assert kernel["STACK"] == kernel["LOCAL"] == 0, f"registers were spilled: {kernel}"
        assert kernel["REG"] * kernel["warps"] * 32 <= 65536
        # Triton adds two pointers of its own.
        assert kernel["parameters"] == kernel["arguments"] + 2
        accesses = {int(size): count for size, count in kernel["bytes"].items()}
        # Statistics and addresses are narrow by nature; a row accessed element by element takes sixteen at least.
        assert min(accesses) >= 4, f"features are accessed one at a time: {kernel}"
        assert sum(count for size, count in accesses.items() if size < 8) < 16, f"rows are accessed narrowly: {kernel}"
        if kernel["kernel"] != "_gradients":
            # There a thread has four features, not sixteen.
            assert accesses.get(8, 0) <= 7, f"more than addresses is accessed 8 bytes at a time: {kernel}"
        assert sum(count for size, count in accesses.items() if size >= 16) >= 8


def test_import_is_lazy() -> None:
    run(
        "-c",
        "import sys, attnres_compile.ops.factored\n"
        "before = 'triton' in sys.modules\n"
        "import attnres_compile.ops.triton\n"
        "assert ('triton' in sys.modules) == before",
    )


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    kernels.reason.cache_clear()
    try:
        assert not kernels.available()
        assert kernels.reason() == "triton is not installed"
        xs, key = [torch.randn(3, 8) for _ in range(2)], torch.randn(8)
        expected = factored.depth_attention(xs, key, 1e-6, 1.0)
        assert torch.equal(kernels.depth_attention(xs, key, 1e-6, 1.0), expected)
    finally:
        kernels.reason.cache_clear()


def test_tensors_of_other_devices() -> None:
    xs, key = [torch.randn(3, 8) for _ in range(2)], torch.randn(8)
    assert torch.equal(kernels.depth_attention(xs, key, 1e-6, 1.0), factored.depth_attention(xs, key, 1e-6, 1.0))
