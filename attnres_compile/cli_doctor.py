"""``attnres doctor``: what this installation can do, and what to install for the rest."""

from __future__ import annotations

import platform
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnres_compile.ops import cpu, triton

OPTIONAL = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "hf": ("transformers", "safetensors"),
    "plot": ("matplotlib",),
}
LIBRARIES = {
    "tensorrt": "builds and runs engines on the GPU at hand, with plugins",
    "tensorrt_rtx": "builds engines for RTX GPUs that need not be there",
}


def doctor() -> None:
    """Say which kernels and optional parts work here, and why others do not."""
    table = Table("part", "works", "what was found", box=None, pad_edge=False)
    for name, works, found in findings():
        table.add_row(name, "[green]yes[/]" if works else "[yellow]no[/]", Text(found))
    Console().print(table)


def findings() -> list[tuple[str, bool, str]]:
    """Per part: its name, whether it works, and what was found or is missing."""
    cuda = torch.cuda.is_available()
    gpu = torch.cuda.get_device_name() if cuda else "no CUDA device; everything works on the CPU"
    found = [
        ("torch", True, f"{torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads"),
        ("CPU kernels", cpu.available(), cpu.reason() or "built for this machine"),
        ("Triton kernels", triton.available() and cuda, triton.reason() or ("ready" if cuda else "no CUDA device")),
        ("CUDA", cuda, gpu),
    ]
    for extra, names in OPTIONAL.items():
        versions = {name: _version(name) for name in names}
        missing = [name for name, number in versions.items() if number is None]
        if missing:
            found.append((extra, False, f"{', '.join(missing)} missing: pip install 'attnres-compile[{extra}]'"))
        else:
            found.append((extra, True, ", ".join(f"{name} {number}" for name, number in versions.items())))
    return [*found, _providers(), *map(_tensorrt, LIBRARIES)]


def _providers() -> tuple[str, bool, str]:
    """What ONNX Runtime can run files on."""
    try:
        providers = import_module("onnxruntime").get_available_providers()
    except Exception as error:
        return "ONNX Runtime", False, f"cannot be imported ({error}): pip install 'attnres-compile[onnx]'"
    return "ONNX Runtime", True, ", ".join(providers)


def _tensorrt(name: str) -> tuple[str, bool, str]:
    """Whether the library can be loaded too: the package of ``tensorrt`` installs without it."""
    try:
        return name, True, f"{name} {import_module(name).__version__}; {LIBRARIES[name]}"
    except Exception as error:
        extra = name.replace("_", "-")
        reason = "missing" if isinstance(error, ModuleNotFoundError) and error.name == name else f"broken ({error})"
        return name, False, f"{name} {reason}: pip install 'attnres-compile[{extra}]'; {LIBRARIES[name]}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
