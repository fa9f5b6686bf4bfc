"""Generation with caches, beams and padding."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.integration.models import example, pair, transformed
from tests.tolerances import assert_close
from tests.zoo import ids, noise

NEW = 6
every_model = pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])


def generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """Exactly `NEW` tokens per sequence: the end-of-sequence token is never chosen."""
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    tokens: Tensor = model.generate(**inputs, **settings)
    return tokens


def prompt(name: str) -> dict[str, Tensor]:
    inputs = {"input_ids": example(name)["input_ids"]}
    return inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}


def logits(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    output = generate(model, inputs, return_dict_in_generate=True, output_logits=True, **options)
    return torch.stack(output.logits)  # type: ignore[attr-defined]


@every_model
@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "static"}, {"num_beams": 3}, {"num_beams": 2, "cache_implementation": "static"}],
    ids=["dynamic", "static", "beams", "static beams"],
)
def test_tokens_are_the_originals_at_zero_queries(name: str, options: dict[str, Any]) -> None:
    original, model = pair(name)
    expected, actual = (generate(each, prompt(name), **options) for each in (original, model))
    assert actual.shape[1] >= NEW
    assert torch.equal(actual, expected)


@every_model
def test_sampling_draws_the_same_tokens_at_zero_queries(name: str) -> None:
    found = []
    for model in pair(name):
        torch.manual_seed(5)
        found.append(generate(model, prompt(name), do_sample=True, top_k=0))
    assert torch.equal(*found)


@every_model
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_cached_equals_uncached_with_random_queries(name: str, cache: str) -> None:
    model = transformed(name)
    options = {"cache_implementation": "static"} if cache == "static" else {}
    expected = logits(model, prompt(name), use_cache=False)
    assert expected.shape[0] == NEW
    assert_close(logits(model, prompt(name), **options), expected)
    assert (logits(pair(name)[1], prompt(name)) - expected).abs().max() > 1e-3


@every_model
def test_beams_with_random_queries(name: str) -> None:
    model = transformed(name)
    cached, uncached = (generate(model, prompt(name), num_beams=3, use_cache=use) for use in (True, False))
    assert torch.equal(cached, uncached)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_left_padding_with_random_queries(cache: str) -> None:
    model = transformed("llama")
    tokens = ids(1, 5)
    inputs = {
        "input_ids": torch.cat([torch.cat([torch.zeros(1, 3, dtype=torch.long), tokens], 1), ids(1, 8)]),
        "attention_mask": torch.ones(2, 8, dtype=torch.long),
    }
    inputs["attention_mask"][0, :3] = 0
    options = {"cache_implementation": "static"} if cache == "static" else {}
    alone = logits(model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, **options)
    padded = logits(model, inputs, **options)
    assert_close(padded[:, 0], alone[:, 0])


def test_prompt_of_embeddings() -> None:
    original, model = pair("llama")
    inputs = {"inputs_embeds": noise(2, 5, 32), "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    assert torch.equal(generate(model, inputs), generate(original, inputs))


def test_a_step_in_chunks_equals_one_step() -> None:
    """The cache holds keys and values of the reads, whatever the chunks the tokens come in."""
    model = transformed("llama")
    tokens = ids(2, 9)
    whole = model(input_ids=tokens, use_cache=True).logits
    cache = DynamicCache(config=model.config)
    positional = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in positional else "past_key_values"
    parts = [model(input_ids=part, use_cache=True, **{name: cache}).logits for part in tokens.split(4, 1)]
    assert len(parts) == 3
    assert_close(torch.cat(parts, 1), whole)
