"""The command line in this process, and models on disk."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attnres_compile.cli import main
from attnres_compile.pretrained import WEIGHTS
from tests.cli import material
from tests.cli.material import Result, Run


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are cut to the terminal's width."""
    monkeypatch.setenv("COLUMNS", "240")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> Result:
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return Result(exit_.value.code, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face model on disk, with two files that only look like a tokenizer's."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    material.llama().save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    (folder / "merges.txt").write_text("a b\n")
    return folder


@pytest.fixture(scope="module")
def transformed(llama: Path) -> Path:
    """What ``transform`` made of it, with queries as if trained."""
    folder = llama.parent / "transformed"
    with pytest.raises(SystemExit) as exit_:
        main(["transform", f"hf:{llama}", "--output", str(folder), "--verify", "quick", "--num-blocks", "2"])
    assert exit_.value.code == 0
    weights = load_file(folder / WEIGHTS)
    weights["attnres.0.query"] += 0.5
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    return folder
