"""Sublayers by the names of the user's modules."""

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from tests.integration.models import example
from tests.zoo import CASES, noise


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("llama", ("model.layers.{}.self_attn", "model.layers.{}.mlp")),
        ("gpt2", ("transformer.h.{}.attn", "transformer.h.{}.mlp")),
        ("nanogpt", ("transformer.blocks.{}.attention", "transformer.blocks.{}.mlp")),
        ("bloom", ("transformer.h.{}.self_attention.dense", "transformer.h.{}.mlp.dense_4h_to_h")),
        ("gpt_neox", ("gpt_neox.layers.{0}.attention + gpt_neox.layers.{0}.mlp",)),
        ("torch_encoder", ("layers.{}.self_attn", "layers.{}.linear2")),
    ],
)
def test_architectures(case: str, expected: tuple[str, ...]) -> None:
    (chain,) = ac.inspect(CASES[case].build(layers=2), example(case)).chains
    assert chain.names == tuple(name.format(layer) for layer in range(2) for name in expected)


class Loop(nn.Module):
    """All adds in the model's own forward, its parts in a list of lists."""

    def __init__(self) -> None:
        super().__init__()
        pairs = ([nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))] for _ in range(2))
        self.layers = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)
        self.stem = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            norm, branch = layer.children()
            x = x + branch(norm(x))
        return torch.nn.functional.normalize(x, dim=-1)


def test_a_path_goes_on_until_names_differ() -> None:
    (chain,) = ac.inspect(Loop(), noise(2, 5, 8)).chains
    assert chain.names == ("layers.0", "layers.1")
