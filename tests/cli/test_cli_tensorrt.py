"""`attnres export --format tensorrt`: an engine, or a line that says what is wrong with the call."""

import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnres_compile.cli import app

GPT = "tests.cli.material:gpt"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt_rtx is not installed")
def test_engine(tmp_path: Path) -> None:
    engine = tmp_path / "model.engine"
    options = ["--format", "tensorrt", "--precision", "fp16", "--compute-capabilities", "86", "--batch", "1:2:4"]
    result = CliRunner().invoke(app, ["export", GPT, str(engine), "--verify", "off", "--num-blocks", "2", *options])
    assert result.exit_code == 0
    assert [file.name for file in tmp_path.iterdir()] == [engine.name]
    assert "4 reads, fp16, tensorrt_rtx" in result.stderr
    assert result.stderr.count("mixed in 1 kernel") == 4
    assert "4 in GPTBlock" in result.stdout


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt_rtx is not installed")
def test_plugins_need_tensorrt(tmp_path: Path) -> None:
    options = ["--format", "tensorrt", "--compute-capabilities", "86", "--plugins", "--verify", "off"]
    result = CliRunner().invoke(app, ["export", GPT, str(tmp_path / "model.engine"), *options])
    assert result.exit_code == 2
    assert "tensorrt_rtx takes no plugins" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options, message",
    [
        (["--batch", "1:2:4"], "--precision, --compute-capabilities, --batch, --length and --plugins need --format"),
        (["--plugins"], "--precision, --compute-capabilities, --batch, --length and --plugins need --format"),
        (
            ["--format", "tensorrt", "--length", "8"],
            "the sequence axis takes smallest:usual:largest, as 1:2",
        ),
        (["--format", "tensorrt", "--compute-capabilities", "8.6"], "--compute-capabilities takes numbers, as 80,86"),
    ],
    ids=["format", "plugins", "range", "capability"],
)
def test_wrong_options(options: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", GPT, str(tmp_path / "model"), "--verify", "off", *options])
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []
