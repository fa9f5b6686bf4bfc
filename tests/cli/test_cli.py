"""The commands, in this process."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attnres_compile.passes.pipelines import GRAPH, OPTIMIZE
from attnres_compile.pretrained import RECORD, WEIGHTS
from tests.cli import material
from tests.cli.material import BERT, GPT, PARAMETERS, SUBLAYERS, Run, error_of

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


def test_export_in_another_form(run: Run, tmp_path: Path) -> None:
    import onnx

    file, options = tmp_path / "model.onnx", ("--verify", "off", "--num-blocks", "2", "--static")
    assert run("export", GPT, file, *options, "--target", "tensorrt", "--body", "stacked").code == 0
    metadata = {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    assert metadata["attnres_compile.target"] == "tensorrt"
    assert metadata["attnres_compile.body"] == "stacked"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "tvm"], "target is one of onnxruntime, tensorrt; got 'tvm'"),
        (["--body", "rolled"], "body is one of unrolled, tied, stacked, matmul; got 'rolled'"),
        (["--cache"], "NanoGPT.forward takes no cache of keys and values (past_key_values)"),
    ],
)
def test_export_options_that_cannot_work(run: Run, tmp_path: Path, options: list[str], message: str) -> None:
    result = run("export", GPT, tmp_path / "model.onnx", "--verify", "off", "--num-blocks", "2", *options)
    assert result.code == 2
    assert error_of(result) == message
    assert list(tmp_path.iterdir()) == []


def test_export_with_weights_of_another_model(run: Run, transformed: Path, tmp_path: Path) -> None:
    result = run("export", GPT, tmp_path / "model.onnx", "--weights", transformed)
    assert result.code == 2
    assert error_of(result).startswith(f"the weights in {transformed} do not fit {GPT}")
    assert list(tmp_path.iterdir()) == []
