"""Triton in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str, **environment: str) -> str:
    """Triton interprets or compiles, never both in one process, so that each has its own."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=variables | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
