"""Saving a transformed model and getting it back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import attnres_compile as ac
from attnres_compile.pretrained import RECORD
from tests.integration.models import QUERY, example, pair, randomise, run, transformed
from tests.zoo import CASES


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_transformers_own_files_are_enough(name: str, tmp_path: Path) -> None:
    model = transformed(name)
    model.save_pretrained(tmp_path)
    restored: Any = ac.from_pretrained(tmp_path, example_inputs=example(name))
    assert type(restored) is type(model) and not restored.training
    assert torch.equal(run(name, restored), run(name, model))
    restored.save_pretrained(tmp_path / "again")
    again = ac.from_pretrained(tmp_path / "again", example_inputs=example(name))
    assert torch.equal(run(name, again), run(name, model))


def test_options_are_beside_the_weights_and_only_there(tmp_path: Path) -> None:
    original = CASES["llama"].build(layers=2)
    model: Any = ac.transform(original, block_size=3, eps=1e-5, key_norm=False, chains=lambda index: index == 0)
    randomise(model)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["attnres"]
    assert saved == {
        "num_blocks": None,
        "block_size": 3,
        "preserve": True,
        "key_norm": False,
        "eps": 1e-5,
        "chains": [0],
    }
    assert not hasattr(original.config, "attnres")
    restored: Any = ac.from_pretrained(tmp_path)
    assert restored.attnres_report.options == saved
    assert restored.attnres_report.chains[0].blocks == (3, 1)
    assert torch.equal(run("llama", restored), run("llama", model))


def test_shards_and_dtype(tmp_path: Path) -> None:
    model = transformed("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    restored = ac.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in restored.parameters()} == {torch.bfloat16}
    assert torch.equal(restored.get_parameter(QUERY), model.get_parameter(QUERY).bfloat16())


def test_any_module(tmp_path: Path) -> None:
    model = transformed("nanogpt")
    ac.save_pretrained(model, tmp_path / "new" / "folder")
    assert sorted(file.name for file in (tmp_path / "new" / "folder").iterdir()) == [RECORD, "model.safetensors"]
    fresh = CASES["nanogpt"].build(layers=3)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    restored = ac.from_pretrained(tmp_path / "new" / "folder", model=fresh, example_inputs=example("nanogpt"))
    assert torch.equal(run("nanogpt", restored), run("nanogpt", model))
    assert not any(parameter.any() for parameter in fresh.parameters())


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformed("nanogpt")
    ac.save_pretrained(model, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def fail(model: Any, file: str) -> None:
        Path(file).write_bytes(b"half")
        raise RuntimeError("no space")

    monkeypatch.setattr("safetensors.torch.save_model", fail)
    with pytest.raises(ac.AttnResError, match="no space"):
        ac.save_pretrained(model, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_no_code_is_read(tmp_path: Path) -> None:
    transformed("llama").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    (tmp_path / "code.py").write_text("raise SystemExit('ran')")
    file.write_text(json.dumps({**config, "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}))
    assert ac.from_pretrained(tmp_path).get_parameter(QUERY).any()
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(ac.InputError, match="no safetensors"):
        ac.from_pretrained(tmp_path)


def test_refusals(tmp_path: Path) -> None:
    original, model = pair("llama")
    with pytest.raises(ac.InputError, match=f"no {RECORD}, and no config.json with 'attnres'"):
        ac.from_pretrained(tmp_path)
    original.save_pretrained(tmp_path)
    with pytest.raises(ac.InputError, match=r"no config\.json with 'attnres'"):
        ac.from_pretrained(tmp_path)
    with pytest.raises(ac.InputError, match="was not transformed"):
        ac.save_pretrained(original, tmp_path)
    # the options without the reads: a plain model that was loaded from a transformed one's folder and saved again
    original.config.attnres = model.config.attnres
    original.save_pretrained(tmp_path)
    with pytest.raises(ac.InputError, match=r"do not fit LlamaForCausalLM.*"):
        ac.from_pretrained(tmp_path)
    ac.save_pretrained(transformed("nanogpt"), tmp_path / "other")
    with pytest.raises(ac.InputError, match="pass the original architecture as model="):
        ac.from_pretrained(tmp_path / "other")
