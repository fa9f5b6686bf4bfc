"""``attnres plot``."""

from pathlib import Path

import pytest

from attnres_compile.cli import main
from attnres_compile.cli_plots import label
from tests.cli import material

GPT = f"{material.__name__}:gpt"


def plot(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["plot", *map(str, arguments)])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_all_of_one_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "pictures"
    assert plot("all", GPT, "--output", folder, "--num-blocks", 2) == 0
    assert names(folder) == ["dynamics.png", "index.html", "mixing.png", "weights.png"]
    assert capsys.readouterr().out.splitlines() == [
        str(folder / name) for name in ("weights.png", "mixing.png", "dynamics.png", "index.html")
    ]
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert page.count("data:image/png") == 3 and "gradients of a fixed random projection" in page


def test_two_models_share_the_dynamics(tmp_path: Path) -> None:
    transformed = tmp_path / "transformed"
    material.llama().save_pretrained(tmp_path / "llama")
    with pytest.raises(SystemExit):
        main(["transform", f"hf:{tmp_path / 'llama'}", "--output", str(transformed), "--verify", "off"])
    folder = tmp_path / "pictures"
    assert plot("dynamics", GPT, f"hf:{transformed}", "--output", folder) == 0
    assert names(folder) == ["dynamics.png", "index.html"]
    assert plot("weights", GPT, f"hf:{transformed}", "--output", tmp_path / "weights") == 0
    assert names(tmp_path / "weights") == ["index.html", "weights-1.png", "weights-2.png"]
    assert plot("dynamics", f"hf:{transformed}", "--output", folder) == 0
    assert "gradients of the loss" in (folder / "index.html").read_text(encoding="utf-8")


def test_labels_are_short_and_different() -> None:
    assert label("hf:/models/small/", ()) == "small"
    assert label("hf:/other/small", {"small"}) == "hf:/other/small"
    assert label(GPT, ()) == GPT


def test_wrong_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("some words")
    assert plot("weights", GPT, "--output", tmp_path / "x", "--text", text) == 2
    assert "--text needs a model with a tokenizer" in capsys.readouterr().err
    assert plot("colours", GPT, "--output", tmp_path / "x") == 2
    assert not (tmp_path / "x").exists()
