"""Compiles what the Triton kernels would launch, for GPUs that need not be there, and prints what came out as JSON.

Run as `python -m tests.ops.triton_compile '[[90, "bfloat16", 1024, ["depth_attention"]], ...]'`. The functions run on
CPU tensors with Triton's launch replaced, so that signatures and alignments are those of real calls.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attnres_compile.ops import triton as kernels
from attnres_compile.ops.triton import launch

TOKENS, SOURCES, READS = 4, 3, 6


class Driver:
    """Stands in for a CUDA driver: enough of it to compile."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> GPUTarget:
        # Triton's cache of compiled kernels is per device.
        return self.target

    def get_current_stream(self, device: GPUTarget) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextmanager
def compiling(capability: int) -> Iterator[list[Any]]:
    """Replaces every launch by a compilation; the list fills with the compiled kernels."""
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))

    triton.runtime.driver.set_active(Driver(capability))
    with mock.patch.object(JITFunction, "run", compile_only), mock.patch.object(launch, "INTERPRETED", True):
        yield compiled


def call(name: str, dtype: torch.dtype, d: int, centred: bool = True) -> None:
    """Calls one function of the kernels with all its options in use."""

    def rows(dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(TOKENS, d, dtype=dtype)

    sources = [rows() for _ in range(SOURCES)]
    keys, o, m = torch.zeros(READS, d), rows(torch.float32), torch.zeros(TOKENS)
    key, weight = keys[0], rows()[0]
    phase_1 = torch.zeros(READS, TOKENS, d), torch.zeros(READS, TOKENS), torch.zeros(READS, TOKENS)
    match name:
        case "depth_attention":
            kernels.depth_attention(sources, key, 1e-6, 1.0)
        case "depth_attention_backward":
            kernels.depth_attention_backward(rows(), sources, key, 1e-6, 1.0)
        case "inter_block":
            kernels.inter_block(sources, keys, 1e-6)
        case "inter_block_backward":
            kernels.inter_block_backward(*phase_1, sources, keys, 1e-6)
        case "merge":
            kernels.merge(o, m, m, rows(), key, 1e-6, 1.0)
        case "merge_backward":
            kernels.merge_backward(rows(), o, m, m, rows(), key, 1e-6, 1.0)
        case "add_merge_norm":
            kernels.add_merge_norm(rows(), rows(), o, m, m, key, weight, weight, 1e-6, 1e-6, 1.0, centred)
        case "add_merge_norm_backward":
            kernels.add_merge_norm_backward(rows(), rows(), rows(), o, m, m, key, weight, 1e-6, 1e-6, 1.0, centred)
        case _:
            raise ValueError(name)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes of stack and local memory: a spill takes either."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    return {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", listing)}


def describe(kernel: Any) -> dict[str, Any]:
    ptx = kernel.asm["ptx"]
    entry = re.search(r"\.entry [^(]*\((.*?)\)", ptx, re.DOTALL)
    assert entry is not None
    accesses = re.findall(r"(?:ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", ptx)
    sizes = [int(count or 1) * int(bits) // 8 for count, bits in accesses]
    return {
        "kernel": kernel.metadata.name,
        "warps": kernel.metadata.num_warps,
        "parameters": entry[1].count(".param"),
        "arguments": sum(type_ != "constexpr" for type_ in kernel.src.signature.values()),
        "bytes": {size: sizes.count(size) for size in sorted(set(sizes))},
        **resources(kernel.asm["cubin"]),
    }


def main() -> None:
    for capability, dtype, d, names in json.loads(sys.argv[1]):
        for name in names:
            with compiling(capability) as compiled:
                call(name, getattr(torch, dtype), d)
            for kernel in compiled:
                if kernel.metadata.name != "_write":
                    where = {"capability": capability, "dtype": dtype, "d": d, "function": name}
                    print(json.dumps(where | describe(kernel)), flush=True)


if __name__ == "__main__":
    main()
