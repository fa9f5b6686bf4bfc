"""The examples run as a user runs them."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*arguments: object) -> str:
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_training_from_scratch(tmp_path: Path) -> None:
    out = run("examples/train_from_scratch.py", "--quick", "--output", tmp_path)
    assert out.count("✓") == 3
    names = {"curves", "dynamics", "weights-0", "mixing"}
    assert {file.name for file in tmp_path.iterdir()} == {f"{n}.png" for n in names} | {
        "index.html",
        "results.md",
        "runs",
    }
    first, second = (json.loads(file.read_text()) for file in sorted((tmp_path / "runs").iterdir()))
    assert [first["label"], second["label"]] == ["Block AttnRes, N = 4", "residual"]
    # zero queries: both start as one model, at nearly the loss of a uniform guess, and fall from there
    assert abs(first["losses"][0] - second["losses"][0]) < 1e-3
    for entry in (first, second):
        assert abs(entry["losses"][0] - math.log(256)) < 0.2
        assert entry["losses"][-1] < 0.7 * entry["losses"][0]
        for name in ("code", "prose"):
            assert entry["held_out"][name] < entry["curve"][0][name] - 1
    # what is done is not done again
    stamps = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "runs").iterdir()}
    run("examples/train_from_scratch.py", "--report", "--output", tmp_path)
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "runs").iterdir()} == stamps


@pytest.mark.slow
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import train_from_scratch as script  # type: ignore[import-not-found]

    settings = script.Run(2, 0, 2e-3, width=32, layers=3, steps=6, batch=2, length=16)
    through = json.loads(script.train(settings, tmp_path / "through").read_text())
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "CHECKPOINT_EVERY", 0.0)
    stop = script.rate

    def interrupted(step: int, run: object) -> float:
        if step == 4:
            raise KeyboardInterrupt
        return float(stop(step, run))

    monkeypatch.setattr(script, "rate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script.train(settings, tmp_path / "resumed")
    assert list((tmp_path / "build" / "study").iterdir())
    monkeypatch.setattr(script, "rate", stop)
    resumed = json.loads(script.train(settings, tmp_path / "resumed").read_text())
    for key in ("losses", "curve", "held_out", "depth"):
        assert resumed[key] == through[key], key
    assert not list((tmp_path / "build" / "study").iterdir())
