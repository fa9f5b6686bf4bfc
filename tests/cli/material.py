"""Models that the command line's tests name as ``tests.cli.material:<callable>``."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from tests.own_models import NanoGPT

WIDTH, VOCAB = 16, 61
NUMBER = 3


def gpt() -> tuple[nn.Module, Tensor]:
    """Two layers: one chain of four sublayers."""
    return NanoGPT(2, VOCAB, WIDTH, 2, 0.0), torch.arange(10).reshape(2, 5)


def gpt_without_inputs() -> nn.Module:
    return gpt()[0]


def gpt_of_another_seed() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    return gpt()


def llama() -> LlamaForCausalLM:
    """Two layers: one chain of four sublayers."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def bert() -> BertForMaskedLM:
    """Post-norm: the norm comes after the add, so there is no residual stream."""
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    return BertForMaskedLM(config)


def number() -> int:
    return NUMBER


def broken() -> nn.Module:
    raise RuntimeError("no such checkpoint")


GPT, BERT = (f"{__name__}:{name}" for name in ("gpt", "bert"))
SUBLAYERS = 4
PARAMETERS = SUBLAYERS * WIDTH * 2


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.out)
        return report


Run = Callable[..., Result]


def error_of(result: Result) -> str:
    """The message of the one error; its lines are all that is printed after the steps."""
    assert result.err.count("error: ") == 1
    assert "Traceback" not in result.err
    return result.err.partition("error: ")[2].strip()
