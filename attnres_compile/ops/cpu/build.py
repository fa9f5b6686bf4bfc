"""Builds the kernels with the machine's C++ compiler, at first use, and keeps them in the user's cache folder.

CXX and CXXFLAGS are the compiler and options for it, XDG_CACHE_HOME is where the cache folder lies instead of ~/.cache.

Nothing is built at import, nothing is printed, and whatever goes wrong is a reason, not an error: `load` then gives no
library and the callers use plain PyTorch.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import torch

from attnres_compile.ops.cpu import dispatcher
from attnres_compile.ops.cpu.abi import declared

STORAGE_TYPES: Final = {
    torch.float32: "float",
    torch.bfloat16: "BFloat16",
    torch.float16: "Half",
    torch.float64: "double",
}
SWITCH: Final = "ATTNRES_COMPILE_CPU_KERNELS"
_SOURCE: Final = Path(__file__).with_name("kernels.cpp")
_COMPILERS: Final = ("g++", "c++", "clang++")
_OPTIONS: Final = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-w")
# Not every compiler knows each of them: the first set that builds is taken.
_OPTIONAL: Final = (("-march=native", "-fopenmp"), ("-fopenmp",), ("-march=native",), ())
_TIMEOUT_S: Final = 600
_LOCK: Final = threading.Lock()


class BuildError(Exception):
    """Why there is no library."""


def load(dtype: torch.dtype = torch.float32) -> ctypes.CDLL | None:
    """The kernels for sources of one of `STORAGE_TYPES`, built if need be; None if there are none, see `reason`."""
    return _loaded(dtype)[0]


def reason(dtype: torch.dtype = torch.float32) -> str:
    """Why `load` gives None, and what to do; empty if it does not."""
    return _loaded(dtype)[1]


def forget() -> None:
    """Look for compiler, cache folder and switch again at the next `load`."""
    if dispatcher.loaded is not None:
        for dtype in STORAGE_TYPES:
            dispatcher.install(dtype, None)
    _found.cache_clear()


def _loaded(dtype: torch.dtype) -> tuple[ctypes.CDLL | None, str]:
    # Without the lock each thread would build.
    with _LOCK:
        return _found(dtype)


@cache
def _found(dtype: torch.dtype) -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get(SWITCH, "1") == "0":
        return None, f"turned off by {SWITCH}=0"
    try:
        kernels = declared(_built(_SOURCE, [f"-DATTNRES_STORAGE={STORAGE_TYPES[dtype]}"]))
    except BuildError as error:
        return None, str(error)
    if dispatcher.loaded is None:
        with contextlib.suppress(BuildError):
            dispatcher.loaded = _built(dispatcher.SOURCE, *dispatcher.options())
    if dispatcher.loaded is not None:
        dispatcher.install(dtype, kernels)
    return kernels, ""


def _built(source: Path, defines: list[str], links: list[str] | None = None) -> ctypes.CDLL:
    compiler = _compiler()
    problems: list[str] = []
    for optional in _OPTIONAL:
        options = [*_OPTIONS, *optional, *defines, *shlex.split(os.environ.get("CXXFLAGS", ""))]
        links = [*(links or []), *_openmp_options(options)]
        for folder in _folders(_key(source, compiler, options, links)):
            try:
                return _library(source, folder, [*compiler, *options], [*compiler, "-shared"], links)
            except subprocess.CalledProcessError as error:
                problems.append(_first_error(error))
                break
            except subprocess.TimeoutExpired as error:
                raise BuildError(f"{shlex.join(compiler)} took longer than {_TIMEOUT_S} s") from error
            except OSError as error:
                problems.append(str(error))
    raise BuildError(f"{shlex.join(compiler)} could not build the kernels: {problems[0]}")


def _compiler() -> list[str]:
    """The command of the compiler: CXX, which may hold options, or the first one on the PATH."""
    command = shlex.split(os.environ.get("CXX", ""))
    found = next((path for name in command[:1] or _COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        what = f"CXX={command[0]} is not on the PATH" if command else "no C++ compiler"
        raise BuildError(f"{what}: set CXX or install g++")
    return [found, *command[1:]]


def _library(source: Path, folder: Path, compile_: list[str], link: list[str], links: list[str]) -> ctypes.CDLL:
    library = folder / f"{source.stem}.so"
    if not library.exists():
        # Other processes may be building the same: each under its own name, and the last one's stays.
        with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
            unfinished, compiled = Path(scratch, library.name), Path(scratch, f"{source.stem}.o")
            _run([*compile_, "-c", str(source), "-o", str(compiled)])
            _run([*link, str(compiled), "-o", str(unfinished), *links])
            os.replace(unfinished, library)
    return ctypes.CDLL(str(library))


def _openmp_options(options: list[str]) -> list[str]:
    """Link options: the very OpenMP library that torch has loaded, so that there are not two pools of threads."""
    if "-fopenmp" not in options:
        return []
    runtime = _openmp_of_torch()
    return ["-fopenmp"] if runtime is None else [str(runtime), f"-Wl,-rpath,{runtime.parent}"]


def _openmp_of_torch() -> Path | None:
    package = Path(torch.__file__).parent
    folders = (package / "lib", package.with_name("torch.libs"))
    return next((path for folder in folders for path in sorted(folder.glob("libgomp*.so*"))), None)


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, check=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    return done.stdout


def _first_error(error: subprocess.CalledProcessError) -> str:
    lines = [line for line in str(error.stderr).splitlines() if "error" in line] or str(error.stderr).splitlines()
    return lines[0].strip() if lines else f"exit status {error.returncode}"


def _key(source: Path, compiler: list[str], options: list[str], links: list[str]) -> str:
    """Everything that the library depends on."""
    digest = hashlib.sha256()
    for part in sorted([source, *source.parent.glob("*.h")]):
        digest.update(part.read_bytes())
    try:
        version = _run([*compiler, "--version"])
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{shlex.join(compiler)} does not run: {error}") from error
    parts = [*compiler, version, torch.__version__, *options, *links, platform.machine(), _processor()]
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()[:32]


def _processor() -> str:
    """What -march=native looks at."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return platform.processor()


def _folders(name: str) -> Iterator[Path]:
    """Where the library may lie: the user's cache, and a folder that goes again where that cannot be used."""
    with contextlib.suppress(OSError, RuntimeError):
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        folder = Path(home, "attnres_compile", name)
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) or any(folder.glob("*.so")):
            yield folder
    with tempfile.TemporaryDirectory(prefix="attnres_compile-") as temporary:
        yield Path(temporary)
