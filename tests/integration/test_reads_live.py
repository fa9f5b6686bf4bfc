"""How often a state is read, by which row, and what happens to the rows when layers are skipped."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import attnres_compile as ac
from attnres_compile.observer import Observer
from attnres_compile.ops import reference
from tests.block_attnres import PlainTransformer
from tests.integration.models import CountOps, attnres_parameters, example, randomise, run, transformed
from tests.programs.parts import Net, Pair
from tests.tolerances import assert_close
from tests.zoo import CASES, noise, seeded

X = noise(2, 7, 5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "nanogpt"])
def test_one_read_per_norm_module(name: str) -> None:
    """Six norms read more than one source; the first reads the source itself, without an operator."""
    model = transformed(name)
    reads: dict[str, int] = {}
    with CountOps() as counted, torch.no_grad(), Observer() as observer:
        for key, module in model.named_modules():
            if "norm" in type(module).__name__.lower() and "attn" not in key.rpartition(".")[0]:
                last: Any = lambda module, args, key=key: reads.update({key: counted.reads})  # noqa: E731
                module.register_forward_pre_hook(last)
        run(name, model)
    assert counted.reads == 6
    assert list(reads.values()) == [0, 1, 2, 3, 4, 5, 6]
    assert observer.rows == {(0, row) for row in range(6)}
    assert observer.pushes == {0: 6}
    assert counted.counts["inter_block"] == 2


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_one_read_per_hand_written_norm(norm: Any) -> None:
    model = ac.transform(PlainTransformer(norm=norm), torch.arange(10).view(2, 5), num_blocks=3, verify="off")
    with CountOps() as counted, torch.no_grad():
        model(torch.arange(10).view(2, 5))
    assert counted.reads == 6


# Layers that do not run


class Skipping(Net):
    """Some layers are skipped, by layer drop in training or by leaving early."""

    skipped: frozenset[int] = frozenset()
    stop: int | None = None

    def middle(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index == self.stop:
                break
            if not (self.training and index in self.skipped):
                x = layer(x)
        return x


def skipping(blocks: int = 4) -> Any:
    model = ac.transform(seeded(Skipping), X, num_blocks=blocks, verify="off")
    randomise(model)
    return model


def expected(model: Any, layers: Iterable[int], last: int) -> Tensor:
    """By hand, where each layer is a block: layer i reads rows 2i - 1 and 2i, whichever layers ran before it."""
    reads = model.attnres[0]

    def read(sources: list[Tensor], row: int) -> Tensor:
        if len(sources) == 1:
            return sources[0]
        query, key_norm = reads.query[row], reads.key_norm[row]
        return reference.depth_attention(sources, query, key_norm, eps=1e-6, scale=float(len(sources)))

    blocks = [model.embed(X)]
    for index in layers:
        pair: Pair = model.layers[index]
        first = pair.f(read(blocks, 2 * index - 1))
        blocks = [*blocks, first + pair.g(read([*blocks, first], 2 * index))]
    return model.finish(read(blocks, last))


@pytest.mark.parametrize("skipped", [set(), {1}, {2}, {1, 2}, {3}, {0}, {0, 1}, {0, 3}], ids=str)
def test_layer_drop_keeps_the_rows(skipped: set[int]) -> None:
    model = skipping().train()
    model.skipped = frozenset(skipped)
    kept = [index for index in range(4) if index not in skipped]
    with Observer() as observer:
        actual = model(X)
    # the final norm reads the last row, unless the layer before it is skipped: then it has that layer's state
    last = 2 * kept[-1] + 1
    assert_close(actual, expected(model, kept, last))
    first = kept[0]
    rows = {row for index in kept for row in (2 * index - 1, 2 * index) if row > 2 * first - 1} | {last}
    assert observer.rows == {(0, row) for row in rows}


@pytest.mark.parametrize("skipped", [{1}, {0}], ids=str)
def test_layer_drop_trains_the_rows_of_the_layers_that_run(skipped: set[int]) -> None:
    model = skipping().train()
    model.skipped = frozenset(skipped)
    model(X).square().sum().backward()
    gradient = model.attnres[0].query.grad
    assert gradient is not None
    dead = {1: [1, 2], 0: [0, 1]}[next(iter(skipped))]
    assert [row for row in range(8) if not gradient[row].any()] == dead


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_early_exit(stop: int) -> None:
    model = skipping()
    model.stop = stop
    assert_close(model(X), expected(model, range(stop), 2 * stop - 1))


@pytest.mark.parametrize("blocks", [1, 2, 3, 8])
def test_skipping_at_zero_queries_is_exact(blocks: int) -> None:
    original: Any = seeded(Skipping).train()
    model = ac.transform(original, X, num_blocks=blocks, verify="quick")
    cases: list[tuple[set[int], int | None]] = [({1}, None), ({0, 2}, None), ({0, 1, 2, 3}, None), (set(), 2), ({0}, 3)]
    for skipped, stop in cases:
        for each in (original, model):
            each.skipped, each.stop = frozenset(skipped), stop
        assert_close(model(X), original(X), str((skipped, stop)))


def test_layer_drop_of_a_library_model() -> None:
    """Whisper draws anew in each training step which layers it drops."""
    original: Any = CASES["whisper"].build(layers=4)
    model: Any = ac.transform(original, example("whisper"), num_blocks=2, verify="off")
    for each in (original, model):
        each.train()
        each.model.encoder.layerdrop = each.model.decoder.layerdrop = 0.5
    for seed in range(4):
        assert_close(run("whisper", model, seed=seed), run("whisper", original, seed=seed))
    assert len(attnres_parameters(model)) == 4
