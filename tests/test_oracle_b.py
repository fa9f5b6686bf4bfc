"""Oracle (b): random queries and key norms equal the hand-written Block AttnRes model, forward and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.config import AttnResConfig
from tests.block_attnres import HandWrittenBlockAttnRes, ParallelTransformer, PlainTransformer, randomise
from tests.tolerances import assert_close

TOKENS = torch.arange(18).reshape(2, 9) * 7 % 31
PLANS: list[dict[str, Any]] = [{"block_size": n} for n in (1, 2, 3, 4, 10)] + [{"num_blocks": n} for n in (1, 3, 5)]


def hand_written(model: PlainTransformer, sublayers: int, options: dict[str, Any], preserve: bool) -> nn.Module:
    config = AttnResConfig(**options)
    blocks = config.block_sizes(sublayers)
    made = HandWrittenBlockAttnRes(model, blocks=blocks, preserve=preserve, eps=config.eps)
    randomise(made)
    return made


@pytest.mark.parametrize("route", ["live", "graph"])
@pytest.mark.parametrize("preserve", [True, False], ids=["preserved", "mean"])
@pytest.mark.parametrize("options", PLANS, ids=lambda o: "-".join(f"{k}{v}" for k, v in o.items()))
@pytest.mark.parametrize("kind", [PlainTransformer, ParallelTransformer])
def test_equals_the_hand_written_model(
    kind: type[PlainTransformer], options: dict[str, Any], preserve: bool, route: str
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = kind(layers=5, norm="rms").double()
    sublayers = 5 if kind is ParallelTransformer else 10
    expected_model = hand_written(model, sublayers, options, preserve)
    transformed: nn.Module
    if route == "live":
        transformed = ac.transform(model, TOKENS, preserve=preserve, verify="off", **options)
    else:
        program = torch.export.export(model, (TOKENS,), strict=False)
        transformed = ac.transform(program, preserve=preserve, verify="off", **options).module()
    own = dict(transformed.named_parameters())
    theirs = dict(expected_model.named_parameters())
    with torch.no_grad():
        for name in ("query", "key_norm"):
            own[f"attnres.0.{name}"].copy_(theirs[name])
    expected, actual = expected_model(TOKENS), transformed(TOKENS)
    assert_close(actual, expected, "outputs")

    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chosen = [name for name in own if not name.startswith("attnres.")]
    grads = gradients(actual, weights, [own["attnres.0.query"], own["attnres.0.key_norm"], *(own[n] for n in chosen)])
    inner = {name.removeprefix("model."): p for name, p in theirs.items()}
    wanted = gradients(expected, weights, [theirs["query"], theirs["key_norm"], *(inner[n] for n in chosen)])
    for name, gradient, reference in zip(["query", "key_norm", *chosen], grads, wanted, strict=True):
        assert_close(gradient, reference, name)


def gradients(output: Tensor, weights: Tensor, parameters: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad((output * weights).sum(), parameters)
