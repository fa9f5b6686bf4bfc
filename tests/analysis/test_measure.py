"""Measurements against a model written by hand from the paper, whose intermediate values are at hand."""

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.analysis import ChainMeasure, measure
from attnres_compile.ops import reference
from tests.block_attnres import PlainTransformer
from tests.integration.models import example, pair, randomise, transformed

LAYERS, EPS = 3, 1e-6


def rms(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


def tokens() -> Tensor:
    return torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(0))


def made(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = ac.transform(PlainTransformer(layers=LAYERS).double(), tokens(), verify="off", **options)
    randomise(model)
    return model


def by_hand(model: Any, chain: ChainMeasure) -> tuple[list[list[Tensor]], list[Tensor], list[Tensor]]:
    """Per read its sources, per sublayer its output, and the outputs' gradients, from the equations."""
    reads, ends = model.attnres[0], list(accumulate(chain.block_sizes))
    finished, partial, outputs, sources = [model.embed(tokens())], None, list[Tensor](), list[list[Tensor]]()
    h = finished[0]
    for done, sublayer in enumerate(model.sublayers(), 1):
        outputs.append(sublayer(h))
        partial = outputs[-1] if partial is None else partial + outputs[-1]
        sources.append([*finished, partial])
        if done in ends[:-1]:
            finished, partial = sources[-1], None
        scale = len(sources[-1]) if chain.preserve else 1.0
        key_norm = None if reads.key_norm is None else reads.key_norm[done - 1]
        h = reference.depth_attention(sources[-1], reads.query[done - 1], key_norm, eps=EPS, scale=scale)
    loss = model.head(model.norm(h)).square().mean()
    return sources, outputs, list(torch.autograd.grad(loss, outputs))


@pytest.mark.parametrize(
    "options",
    [{"num_blocks": 3}, {"block_size": 4}, {"block_size": 1}, {"num_blocks": 1}, {"num_blocks": 2, "preserve": False}],
)
@pytest.mark.parametrize("key_norm", [True, False])
def test_against_the_equations(options: dict[str, Any], key_norm: bool) -> None:
    model = made(key_norm=key_norm, **options)
    (chain,) = measure(model, tokens(), loss=lambda logits: logits.square().mean()).chains
    sources, outputs, gradients = by_hand(model, chain)
    reads: Any = model.get_submodule("attnres.0")
    mixed = chain.mixing()
    assert chain.embedding == pytest.approx(rms(sources[0][0]))
    assert len(chain.sublayers) == 2 * LAYERS
    for l, sublayer in enumerate(chain.sublayers):
        assert sublayer.output == pytest.approx(rms(outputs[l]))
        assert sublayer.gradient == pytest.approx(rms(gradients[l]))
        assert sublayer.state == pytest.approx(rms(sources[l][-1]))
        read = sublayer.read
        assert read is not None
        keys = [v * torch.rsqrt(v.square().mean(-1, keepdim=True) + EPS) for v in sources[l]]
        key = reads.query[l] * (reads.key_norm[l] if key_norm else 1)
        weights = torch.stack([k @ key for k in keys]).softmax(0).detach()
        assert read.weights == pytest.approx(weights.flatten(1).mean(1).tolist())
        assert read.entropy == pytest.approx(float(-(weights * weights.log()).sum(0).mean()))
        h = (weights.unsqueeze(-1) * torch.stack(sources[l])).sum(0)
        scale = len(sources[l]) if chain.preserve else 1
        assert read.magnitude == pytest.approx(scale * rms(h))
        assert read.partial is not (l + 1 in list(accumulate(chain.block_sizes))[:-1])
        # every output counts as its block does
        assert float(mixed[l + 1, l + 2 :].abs().sum()) == 0.0
        assert float(mixed[l + 1, 0]) == pytest.approx(scale * read.weights[0])
        assert float(mixed[l + 1, l + 1]) == pytest.approx(scale * read.weights[-1])


def test_zero_queries_are_the_residual_stream() -> None:
    model = pair("nanogpt")[1]
    (chain,) = measure(model, example("nanogpt")).chains
    assert torch.allclose(chain.mixing(), torch.ones(7, 7, dtype=torch.float64).tril())
    for sublayer in chain.sublayers:
        assert sublayer.read is not None
        assert sublayer.read.entropy == pytest.approx(math.log(len(sublayer.read.weights)), rel=1e-5)
    assert [s.name for s in chain.sublayers[:2]] == ["transformer.blocks.0.attention", "transformer.blocks.0.mlp"]


def test_a_parallel_layer_is_one_sublayer() -> None:
    (chain,) = measure(transformed("gpt_neox"), example("gpt_neox")).chains
    assert len(chain.sublayers) == 3
    assert all(sublayer.output > 0 and sublayer.gradient > 0 for sublayer in chain.sublayers)


def test_the_models_own_loss_and_every_chain() -> None:
    inputs = example("t5")
    model = transformed("t5")
    found = measure(model, inputs | {"labels": inputs["decoder_input_ids"]})
    with torch.no_grad():
        assert found.loss == pytest.approx(float(model(**inputs, labels=inputs["decoder_input_ids"]).loss), rel=1e-5)
    assert [len(chain.sublayers) for chain in found.chains] == [6, 9]
    assert [chain.container for chain in found.chains] == ["encoder", "decoder"]


def test_nothing_is_disturbed() -> None:
    model = transformed("nanogpt").train()
    model.transformer["blocks"].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = (measure(model, example("nanogpt")) for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert first == second and first.loss is None


def test_where_only_the_reads_train() -> None:
    model = transformed("nanogpt")
    ac.trainable_parameters(model, "attnres")
    (chain,) = measure(model, example("nanogpt")).chains
    # the first output is before any read, so no gradient passes it
    assert math.isnan(chain.sublayers[0].gradient) and chain.sublayers[1].gradient > 0


def test_a_model_that_was_not_transformed_is_refused() -> None:
    with pytest.raises(ac.InputError, match="NanoGPT was not transformed"):
        measure(pair("nanogpt")[0], example("nanogpt"))
