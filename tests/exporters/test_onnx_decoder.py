"""A decoder with its cache as inputs and outputs, token by token in ONNX Runtime."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnres_compile.errors import InputError
from attnres_compile.exporters import export_onnx_decoder
from tests.exporters.onnx_material import ort
from tests.integration.models import transformed
from tests.zoo import CASES, ids

NEW = 8


def greedy(path: Path, tokens: Tensor, mask: Tensor) -> Tensor:
    """What a runtime's loop does: the prompt with an empty cache, then one token after another."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    caches = [value for value in session.get_inputs() if value.name.startswith("past_")]
    cache: dict[str, Any] = {v.name: torch.zeros(len(tokens), v.shape[1], 0, v.shape[3]).numpy() for v in caches}
    step = tokens
    for _ in range(NEW):
        results = session.run(None, {"input_ids": step.numpy(), "attention_mask": mask.numpy(), **cache})
        named = dict(zip(names, results, strict=True))
        step = torch.from_numpy(named.pop("logits"))[:, -1].argmax(-1, keepdim=True)
        tokens, mask = torch.cat([tokens, step], 1), torch.cat([mask, torch.ones_like(step)], 1)
        cache = {name.replace("present_", "past_"): value for name, value in named.items()}
    return tokens


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_tokens_are_those_of_generate(name: str, tmp_path: Path) -> None:
    model = transformed(name)
    result = export_onnx_decoder(model, tmp_path / "decoder.onnx", echo=None)
    assert [output for output, _ in result.parity][:3] == ["logits", "present_key_0", "present_value_0"]
    tokens, mask = ids(3, 7), torch.ones(3, 7, dtype=torch.int64)
    mask[1, :3] = 0
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens, attention_mask=mask, eos_token_id=None, **options)
    assert torch.equal(greedy(result.path, tokens, mask), expected)


@pytest.mark.slow
def test_the_shapes_of_smollm2(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import attnres_compile as ac
    from tests.integration.models import randomise

    torch.manual_seed(0)
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    sizes = {"vocab_size": 97, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(**sizes, **heads, bos_token_id=1, eos_token_id=2)
    model = transformers.LlamaForCausalLM(config).eval()
    model = ac.transform(model, {"input_ids": ids(2, 7)}, num_blocks=3, verify="off")
    randomise(model)
    result = export_onnx_decoder(model, tmp_path / "decoder.onnx", echo=None)
    tokens, mask = ids(1, 7), torch.ones(1, 7, dtype=torch.int64)
    expected = model.generate(tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert torch.equal(greedy(result.path, tokens, mask), expected)


def test_models_without_a_cache(tmp_path: Path) -> None:
    for model in (nn.Linear(3, 3), CASES["vit"].build(layers=2)):
        with pytest.raises(InputError, match="takes no cache of keys and values"):
            export_onnx_decoder(model, tmp_path / "decoder.onnx")
    assert not list(tmp_path.iterdir())
