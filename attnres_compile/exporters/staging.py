"""Files come whole or not at all: they are written in a hidden folder beside their place, and moved."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from attnres_compile.errors import ExportError


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target, on its file system: made before the long work, since the path may not be writable."""
    if target.is_dir():
        raise ExportError(f"cannot write {target}: it is a folder")
    try:
        folder = TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise ExportError(f"cannot write {target}: {error.strerror or error} ({target.parent})") from error
    with folder as name, _interruptible():
        yield Path(name)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM end the process through its ``finally`` clauses, unless somebody handles it already."""
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if mine:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def publish(folder: Path, target: Path) -> None:
    """Move everything into place, the model last: it must never point to weights that are not there yet."""
    for file in sorted(folder.iterdir(), key=lambda file: file.name == target.name):
        os.replace(file, target.parent / file.name)
