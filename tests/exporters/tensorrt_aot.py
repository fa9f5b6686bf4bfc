"""Builds the plugins as TensorRT would and prints what came out as JSON: `python -m tests.exporters.tensorrt_aot`.

A process of its own: `tensorrt` is a stand-in here, and Triton compiles or interprets, never both in one.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton

from attnres_compile.exporters.node_types import DOMAIN
from attnres_compile.exporters.tensorrt_plugins import register_plugins
from tests.exporters import tensorrt_stand_in

CAPABILITIES = (80, 90, 100, 120)
Inputs = list[tuple[tuple[int | str, ...], str]]


def cases() -> list[tuple[str, Inputs, dict[str, float]]]:
    found: list[tuple[str, Inputs, dict[str, float]]] = []
    for n, d, kind in ((2, 64, "FLOAT"), (9, 1024, "HALF"), (33, 4096, "BF16")):
        tokens: tuple[int | str, ...] = ("batch", "length", d)
        eps, scale = {"eps": 1e-6}, {"scale": float(n)}
        sources: Inputs = [(tokens, kind)] * n
        found.append((f"DepthAttentionN{n}", [((d,), kind), ((d,), "FLOAT"), *sources], eps | scale))
        found.append((f"InterBlockN{n}S6", [((6, d), kind), ((6, d), "FLOAT"), *sources], eps))
        o: Inputs = [(tokens, "FLOAT"), (tokens[:2], "FLOAT")]
        vectors: Inputs = [((d,), kind), ((d,), "FLOAT")]
        found.append(("Merge", [*o, (tokens, kind), *vectors], eps | scale))
        for norm in ("RMSNorm", "LayerNorm") if d > 64 else ():
            for add in ("", "Add"):
                rows: Inputs = [(tokens, kind)] * (2 if add else 1)
                inputs = [*o, *rows, *vectors, ((d,), "FLOAT"), ((d,), kind)]
                found.append((f"{add}Merge{norm}", inputs, eps | {"norm_eps": 1e-5} | scale))
    return found


def assembled(ptx: str, capability: int) -> dict[str, Any]:
    """What the assembler of a GPU says of a kernel."""
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    tool = folder / ("ptxas-blackwell" if capability >= 100 and (folder / "ptxas-blackwell").exists() else "ptxas")
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "kernel.ptx"
        file.write_text(ptx)
        command: list[str | Path] = [tool, "-v", f"-arch=sm_{capability}", file, "-o", file.with_suffix(".cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
    registers = re.findall(r"Used (\d+) registers", done.stderr)
    spills = re.findall(r"(\d+) bytes (?:spill stores|spill loads|stack frame)", done.stderr)
    return {"rc": done.returncode, "registers": int(registers[0]) if registers else 0, "spills": sum(map(int, spills))}


def main() -> None:
    trt = tensorrt_stand_in.install()
    every = [name for name, _, _ in cases()]
    print(json.dumps({"first": register_plugins(every[:10]), "then": register_plugins(every)}))
    for name, inputs, attributes in cases():
        found = tensorrt_stand_in.build(trt, f"{DOMAIN}::{name}", inputs, attributes)
        ptx = found.pop("code")
        entry = re.search(r"\.entry (\w+)\((.*?)\)", ptx, re.DOTALL)
        assert entry is not None
        found |= {
            "entry": entry[1],
            "parameters": re.findall(r"\.param \.(\w+)", entry[2]),
            "target": re.findall(r"^\.target (\w+)", ptx, re.MULTILINE),
            "version": re.findall(r"^\.version (\S+)", ptx, re.MULTILINE),
            "paths": "/" in re.sub(r"//.*", "", ptx),
            "d": inputs[0][0][-1],
            "assembled": {capability: assembled(ptx, capability) for capability in CAPABILITIES},
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()
