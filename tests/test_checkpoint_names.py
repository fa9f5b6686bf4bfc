"""Reads under the names of Kimi K3 and of flash-linear-attention."""

from typing import Literal

import pytest
import torch

import attnres_compile as ac
from tests.integration.models import KEY_NORM, QUERY, pair, randomise, run, transformed
from tests.tolerances import assert_close
from tests.zoo import CASES, WIDTH

every_layout = pytest.mark.parametrize("layout", ["k3", "fla"])
Layout = Literal["k3", "fla"]


def test_names_of_k3() -> None:
    state = ac.export_reads(transformed("llama"), "k3")
    expected = [
        f"model.layers.{layer}.{name}_res_{part}.weight"
        for layer in range(3)
        for name in ("self_attention", "mlp")
        for part in ("proj", "norm")
    ]
    assert list(state) == [*expected, "model.output_attn_res_proj.weight", "model.output_attn_res_norm.weight"]


def test_names_of_fla() -> None:
    state = ac.export_reads(transformed("llama"), "fla", prefix="")
    assert list(state)[:4] == [f"layers.0.{name}.weight" for name in NAMES_OF_FLA]
    assert list(state)[-2:] == ["res_proj.weight", "res_norm.weight"]


NAMES_OF_FLA = ("attn_res_proj", "attn_res_norm", "mlp_res_proj", "mlp_res_norm")


def test_rows_are_the_reads_of_those_sublayers() -> None:
    model = transformed("llama")
    state, query, key_norm = ac.export_reads(model, "k3"), model.get_parameter(QUERY), model.get_parameter(KEY_NORM)
    rows = {"layers.0.mlp": 0, "layers.1.self_attention": 1, "layers.1.mlp": 2, "layers.2.self_attention": 3}
    for name, row in (*rows.items(), ("layers.2.mlp", 4), ("output_attn", 5)):
        assert torch.equal(state[f"model.{name}_res_proj.weight"], query[row : row + 1])
        assert torch.equal(state[f"model.{name}_res_norm.weight"], key_norm[row])
    # the first read has one source: whatever its query, it is that source
    assert not state["model.layers.0.self_attention_res_proj.weight"].any()
    assert state["model.layers.0.self_attention_res_norm.weight"].eq(1).all()


@every_layout
def test_round_trip(layout: Layout) -> None:
    source, target = transformed("llama"), pair("llama")[1]
    state = {"model.embed_tokens.weight": torch.zeros(2), **ac.export_reads(source, layout)}
    ac.import_reads(target, state, layout)
    assert torch.equal(run("llama", target), run("llama", source))


def test_without_key_norm_the_norms_are_folded() -> None:
    source = transformed("llama")
    target = ac.transform(CASES["llama"].build(layers=3), num_blocks=3, verify="off", key_norm=False)
    ac.import_reads(target, ac.export_reads(source, "k3"), "k3")
    assert_close(run("llama", target), run("llama", source))
    state = ac.export_reads(target, "k3")
    assert state["model.layers.1.mlp_res_norm.weight"].eq(1).all()


def test_one_chain_of_two() -> None:
    model = pair("whisper")[1]
    randomise(model)
    state = ac.export_reads(model, "fla", chain=0, prefix="encoder.")
    before = model.get_parameter("attnres.1.query").clone()
    with torch.no_grad():
        model.get_parameter(QUERY).zero_()
    ac.import_reads(model, state, "fla", prefix="encoder.")
    assert torch.equal(model.get_parameter(QUERY)[:1], state["encoder.layers.0.mlp_res_proj.weight"])
    assert torch.equal(model.get_parameter("attnres.1.query"), before)


@every_layout
def test_what_does_not_fit_changes_nothing(layout: Layout) -> None:
    model = transformed("llama")
    before, state = model.get_parameter(QUERY).clone(), ac.export_reads(model, layout)
    first = next(iter(state))
    deeper = {key.replace("layers.2", "layers.3"): value for key, value in state.items()}
    for wrong, message in (
        ({key: value for key, value in state.items() if key != first}, "1 of 14 names .* missing"),
        (state | deeper, "a deeper model: it has model.layers.3"),
        (state | {first: torch.ones(1, WIDTH + 1)}, f"shape \\(1, {WIDTH + 1}\\), and {WIDTH} features"),
    ):
        with pytest.raises(ac.InputError, match=message):
            ac.import_reads(model, wrong, layout)
    assert torch.equal(model.get_parameter(QUERY), before)


def test_refusals() -> None:
    model = transformed("llama")
    with pytest.raises(ac.OptionError, match="'k3', 'fla', got 'hf'"):
        ac.export_reads(model, "hf")  # type: ignore[arg-type]
    with pytest.raises(ac.InputError, match="has 1, from 0 on"):
        ac.export_reads(model, "k3", chain=1)
    with pytest.raises(ac.InputError, match="9 sublayers are no sequence of attention and MLP pairs"):
        ac.export_reads(pair("t5")[1], "k3", chain=1)
