import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from attnres_compile.cli import main
from attnres_compile.cli_models import RECORD, WEIGHTS
from attnres_compile.passes.pipelines import GRAPH, OPTIMIZE
from tests import cli_models_material as material

GPT, BERT = (f"{material.__name__}:{name}" for name in ("gpt", "bert"))
SUBLAYERS = 4
PARAMETERS = SUBLAYERS * material.WIDTH * 2


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.out)
        return report


Run = Callable[..., Result]


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


def error_of(result: Result) -> str:
    """The message of the one error; its lines are all that is printed after the steps."""
    assert result.err.count("error: ") == 1
    assert "Traceback" not in result.err
    return result.err.partition("error: ")[2].strip()


# inspect


def test_inspect_prints_the_chain(run: Run) -> None:
    result = run("inspect", GPT)
    assert result.code == 0
    assert result.out.startswith("NanoGPT: 1 residual chain (torch.export)\n")
    assert "4 in GPTBlock" in result.out
    assert "starts with an argument of transformer.blocks.0" in result.out
    assert f"tests{os.sep}own_models.py:38" in result.out
    assert result.err == f"loading {GPT}\ntracing the model and looking for residual chains\n"


def test_inspect_as_json_prints_nothing_else(run: Run) -> None:
    result = run("inspect", GPT, "--json", "--block-size", "3")
    assert result.code == 0
    assert [(c["sublayers"], c["blocks"]) for c in result.report["chains"]] == [(SUBLAYERS, [3, 1])]
    assert result.report["parameters"] == PARAMETERS


def test_options_reach_the_report(run: Run) -> None:
    result = run("inspect", GPT, "--json", "--num-blocks", "2", "--no-key-norm", "--no-preserve", "--eps", "1e-5")
    assert result.code == 0
    assert result.report["chains"][0]["blocks"] == [2, 2]
    assert result.report["parameters"] == PARAMETERS // 2


def test_inspect_prints_the_graph_after_each_pass(run: Run) -> None:
    result = run("inspect", GPT, "--passes", "--block-size", "2")
    assert result.code == 0
    headings = [line for line in result.out.splitlines() if line.startswith("# ")]
    passes = (*GRAPH, "RewriteChains", *OPTIMIZE)
    assert [next(word for word in line.split() if word[0].isupper()) for line in headings] == [
        step if isinstance(step, str) else type(step).__name__ for step in passes
    ]
    texts = dict(zip(headings, result.out.split("\n# ")[1:], strict=True))
    assert "attnres_compile.merge.default" in texts["# after RewriteChains"]
    fused = texts["# after FuseNeighbours"]
    assert "attnres_compile.add_merge_norm.default" in fused or "attnres_compile.merge_norm.default" in fused
    assert "# ScheduleTwoPhase leaves the graph as it is" in headings


def test_inspect_of_a_post_norm_model_gives_the_reason(run: Run) -> None:
    result = run("inspect", BERT)
    assert result.code == 1
    assert result.out.startswith("BertForMaskedLM: 0 residual chains")
    assert "post-norm" in result.out
    assert "modeling_bert.py:" in result.out
    assert error_of(result) == "no residual chain of BertForMaskedLM qualifies"


# transform and verify


def test_transform_writes_weights_options_and_report(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    result = run("transform", GPT, "--output", folder, "--num-blocks", "2", "--chains", "0", "--json")
    assert result.code == 0
    assert sorted(file.name for file in folder.iterdir()) == [RECORD, WEIGHTS]
    record = json.loads((folder / RECORD).read_text())
    assert record["options"]["num_blocks"] == 2
    assert record["options"]["chains"] == [0]
    assert record["report"] == result.report
    assert len(result.report["checks"]) >= 6
    assert load_file(folder / WEIGHTS)["attnres.0.query"].shape == (SUBLAYERS, material.WIDTH)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_round_trip_of_a_callable(run: Run, tmp_path: Path) -> None:
    assert run("transform", GPT, "-o", tmp_path / "out", "--verify", "off").code == 0
    same = run("verify", GPT, tmp_path / "out")
    assert same.code == 0
    assert "✓" in same.out
    assert "✗" not in same.out
    other = run("verify", f"{GPT}_of_another_seed", tmp_path / "out", "--quick")
    assert other.code == 1
    assert "✗   zero queries equal the original" in other.out
    assert error_of(other).startswith("1 of 3 checks failed: zero queries equal the original")


def test_round_trip_of_a_hugging_face_model(run: Run, llama: Path, transformed: Path) -> None:
    assert (transformed / "merges.txt").read_text() == "a b\n"
    assert (transformed / "tokenizer_config.json").read_text() == '{"model_max_length": 64}'
    result = run("verify", f"hf:{llama}", transformed, "--json")
    assert result.code == 0
    assert result.report["chains"][0]["blocks"] == [2, 2]
    assert all(check["error"] <= check["tolerance"] for check in result.report["checks"])


def test_verify_in_memory(run: Run, llama: Path) -> None:
    result = run("verify", f"hf:{llama}", "--quick", "--dtype", "float64", "--json")
    assert result.code == 0
    assert {check["name"] for check in result.report["checks"]} >= {"zero queries equal the original"}


def test_verify_sees_other_base_weights(run: Run, llama: Path, transformed: Path, tmp_path: Path) -> None:
    weights = load_file(transformed / WEIGHTS)
    weights["model.norm.weight"] *= 2
    for file in transformed.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(weights, tmp_path / WEIGHTS, {"format": "pt"})
    result = run("verify", f"hf:{llama}", tmp_path, "--quick")
    assert result.code == 1
    assert "zero queries equal the original" in error_of(result)


def test_saved_options_are_not_overridden(run: Run, llama: Path, transformed: Path) -> None:
    result = run("verify", f"hf:{llama}", transformed, "--num-blocks", "4")
    assert result.code == 2
    assert "brings its own num_blocks" in error_of(result)


def test_a_transformed_directory_is_not_an_original(run: Run, transformed: Path, tmp_path: Path) -> None:
    result = run("transform", f"hf:{transformed}", "-o", tmp_path / "out")
    assert result.code == 2
    assert "is transformed already" in error_of(result)


def test_transform_of_a_post_norm_model_writes_nothing(run: Run, tmp_path: Path) -> None:
    result = run("transform", BERT, "-o", tmp_path / "out")
    assert result.code == 1
    assert "post-norm" in result.out
    assert error_of(result) == "no residual chain of BertForMaskedLM qualifies"
    assert list(tmp_path.iterdir()) == []


# export


def test_export_of_a_transformed_directory_keeps_its_queries(run: Run, transformed: Path, tmp_path: Path) -> None:
    import onnxruntime
    from transformers import LlamaForCausalLM

    import attnres_compile as ac

    file = tmp_path / "model.onnx"
    result = run("export", f"hf:{transformed}", file, "--json", "--static")
    assert result.code == 0
    assert result.report["chains"][0]["blocks"] == [2, 2]
    assert "max |Δ|" in result.err
    ids = torch.arange(3, 21).reshape(2, 9)
    actual = onnxruntime.InferenceSession(str(file)).run(None, {"input_ids": ids.numpy()})[0]
    model = ac.transform(LlamaForCausalLM.from_pretrained(transformed), verify="off", num_blocks=2)
    model.load_state_dict(load_file(transformed / WEIGHTS), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(actual), model(ids).logits, atol=1e-4, rtol=1e-4)


def test_export_has_dynamic_axes(run: Run, tmp_path: Path) -> None:
    import onnx

    file = tmp_path / "model.onnx"
    result = run("export", GPT, file, "--verify", "off", "--num-blocks", "2")
    assert result.code == 0
    shape = onnx.load(file).graph.input[0].type.tensor_type.shape
    assert [size.dim_param for size in shape.dim] == ["batch", "sequence"]
    assert "4 in GPTBlock" in result.out


def test_export_with_weights_of_another_model(run: Run, transformed: Path, tmp_path: Path) -> None:
    result = run("export", GPT, tmp_path / "model.onnx", "--weights", transformed)
    assert result.code == 2
    assert error_of(result).startswith(f"the weights in {transformed} do not fit {GPT}")
    assert list(tmp_path.iterdir()) == []


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
    monkeypatch.chdir(Path(__file__).parents[1])
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
        assert error_of(result) == f"{llama} holds no {RECORD}: give a directory that `attnres transform` wrote"
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
