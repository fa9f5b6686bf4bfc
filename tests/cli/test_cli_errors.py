"""What the command line refuses, and how it says so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attnres_compile.pretrained import RECORD, WEIGHTS
from tests.cli import material
from tests.cli.material import GPT, Run, error_of

# where to write


def test_a_directory_with_other_files_is_left_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    result = run("transform", GPT, "-o", tmp_path, "--force")
    assert result.code == 2
    assert error_of(result).startswith(f"{tmp_path} is not empty")
    assert "loading" not in result.err
    assert [file.name for file in tmp_path.iterdir()] == ["letter.txt"]


def test_an_earlier_transform_is_replaced_with_force_only(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / RECORD).write_text("{}")
    (folder / "stale.safetensors").write_text("")
    refused = run("transform", GPT, "-o", folder)
    assert refused.code == 2
    assert "--force" in error_of(refused)
    assert run("transform", GPT, "-o", folder, "--force", "--verify", "off").code == 0
    assert sorted(file.name for file in folder.iterdir()) == [RECORD, WEIGHTS]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("command", ["transform", "export"])
def test_an_unwritable_output_is_found_before_loading(run: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("")
    for parent in (tmp_path / "file", tmp_path / "missing"):
        target = parent / "out"
        result = run(command, GPT, *(["-o"] if command == "transform" else []), target)
        assert result.code == 2
        assert error_of(result).startswith(f"cannot write {target}: ")
        assert "loading" not in result.err


def test_an_output_that_is_the_wrong_kind(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert error_of(run("transform", GPT, "-o", tmp_path / "file")).endswith("it is a file")
    assert error_of(run("export", GPT, tmp_path)).endswith("it is a directory")


# names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model", "'model' is not the name of a model: give package.module:callable, hf:DIRECTORY or timm:NAME"),
        ("tests", "for a local Hugging Face model write hf:tests"),
        ("no.such:model", "there is no module 'no'"),
        (f"{material.__name__}:nothing", "has no 'nothing'"),
        (f"{material.__name__}:NUMBER", "is of type int, and no callable"),
        (f"{material.__name__}:number", "returned something of type int"),
        (f"{material.__name__}:broken", "broken() failed: RuntimeError: no such checkpoint"),
        (f"{material.__name__}:gpt_without_inputs", "NanoGPT needs example_inputs"),
        ("hf:owner/name", "owner/name is neither a directory nor a .gguf file; hf: takes local files only"),
        ("hf:tests", "tests holds no model"),
        ("timm:vit_tiny_patch16_224", "needs timm, which cannot be imported: pip install timm"),
    ],
)
def test_a_bad_name_is_a_wrong_call(run: Run, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.chdir(Path(__file__).parents[2])
    result = run("inspect", name)
    assert result.code == 2
    assert message in error_of(result)
    assert result.out == ""


def test_the_current_directory_is_importable(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = f"from {material.__name__} import gpt\n\n\nclass Zoo:\n    made = gpt()\n    model, inputs = made\n"
    (tmp_path / "cli_models_of_a_user.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    result = run("inspect", "cli_models_of_a_user:Zoo.model")
    assert result.code == 2
    assert "NanoGPT needs example_inputs" in error_of(result)
    (tmp_path / "cli_models_with_a_mistake.py").write_text("import no_such_package\n")
    broken = run("inspect", "cli_models_with_a_mistake:model")
    assert error_of(broken) == "importing cli_models_with_a_mistake failed: No module named 'no_such_package'"


def test_only_safetensors_are_read(run: Run, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    torch.save(load_file(llama / WEIGHTS), tmp_path / "pytorch_model.bin")
    result = run("inspect", f"hf:{tmp_path}")
    assert result.code == 2
    assert error_of(result).startswith(f"{tmp_path} holds no safetensors files")


def test_code_beside_the_weights_is_not_run(run: Run, llama: Path, tmp_path: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / WEIGHTS).write_bytes((llama / WEIGHTS).read_bytes())
    result = run("inspect", f"hf:{tmp_path}")
    assert result.code == 2
    assert error_of(result).startswith(f"{tmp_path / 'config.json'} cannot be used: ValueError")
    assert not (tmp_path / "ran").exists()


def test_incomplete_weights_are_an_error(run: Run, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    weights = load_file(llama / WEIGHTS)
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / WEIGHTS, {"format": "pt"})
    result = run("inspect", f"hf:{tmp_path}")
    assert result.code == 2
    assert error_of(result) == f"{tmp_path} lacks 1 weights of LlamaForCausalLM, the first is model.norm.weight"


# wrong calls and errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-blocks", "2", "--block-size", "2"], "were both given"),
        (["--num-blocks", "0"], "num_blocks counts whole numbers from 1"),
        (["--num-blocks", "9"], "num_blocks=9 is larger than the 4 sublayers"),
        (["--chains", "first"], "--chains takes indices, as 0,2; got 'first'"),
        (["--chains", "0,3"], "--chains names [3]"),
        (["--dtype", "int8"], "--dtype takes float64, float32, bfloat16 or float16, got 'int8'"),
        (["--eps", "tiny"], "Invalid value for '--eps'"),
        (["--colour"], "No such option: --colour"),
    ],
)
def test_bad_options_are_a_wrong_call(run: Run, options: list[str], message: str) -> None:
    result = run("inspect", GPT, *options)
    assert result.code == 2
    assert message in error_of(result)
    assert result.out == ""


def test_a_missing_record_is_a_wrong_call(run: Run, llama: Path) -> None:
    for arguments in (["verify", GPT, llama], ["export", GPT, llama.parent / "x.onnx", "--weights", llama]):
        result = run(*arguments)
        assert result.code == 2
        assert error_of(result).startswith(f"{llama} holds no {RECORD}, and no config.json with 'attnres' in it: give")
        assert "loading" not in result.err


def test_debug_shows_the_traceback(run: Run) -> None:
    result = run("inspect", f"{material.__name__}:broken", "--debug")
    assert result.code == 2
    assert "Traceback (most recent call last):" in result.err
    assert 'raise RuntimeError("no such checkpoint")' in result.err
    assert result.err.rstrip().endswith("failed: RuntimeError: no such checkpoint")


def test_an_unexpected_error_says_where_to_look(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("attnres_compile.api.inspect", failing)
    result = run("inspect", GPT)
    assert result.code == 1
    assert error_of(result) == "ZeroDivisionError: division by zero (--debug shows where)"


def test_the_command_as_a_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "attnres_compile.cli", "inspect", f"hf:{tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.endswith(
        f"error: {tmp_path} holds no model: a config.json with safetensors, or one GGUF file, is expected\n"
    )


def test_no_arguments_print_the_commands(run: Run) -> None:
    result = run()
    assert result.code == 0
    assert all(command in result.out for command in ("inspect", "transform", "verify", "export"))
