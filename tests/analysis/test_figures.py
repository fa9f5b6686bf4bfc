"""Pictures: what is on their axes, where blocks end, and that they are written whole."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attnres_compile as ac
from attnres_compile.analysis import ChainMeasure, figures, measure, mixing
from tests.integration.models import example, pair, transformed


@pytest.fixture(scope="module")
def chain() -> ChainMeasure:
    (found,) = measure(transformed("nanogpt"), example("nanogpt")).chains
    return found


def labels(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def grey(axes: Any) -> list[float]:
    """Where the lines of block boundaries are, across or down."""
    lines = [line for line in axes.lines if line.get_color() == figures.BOUNDARY["color"]]
    across = [line.get_ydata() for line in lines if list(line.get_xdata()) == [0, 1]]
    down = [line.get_xdata() for line in lines if list(line.get_ydata()) == [0, 1]]
    return [float(ends[0]) for ends in across + down]


def test_weights(chain: ChainMeasure) -> None:
    heat, entropy, embedding, *_ = figures.weights(chain, "a title").axes
    readers = ["0.mlp", "1.attention", "1.mlp", "2.attention", "2.mlp", "output"]
    assert labels(heat.yaxis) == readers
    assert labels(heat.xaxis) == ["embedding", "1", "2", "3"]
    assert heat.get_ylabel() == "read by in transformer.blocks"
    # two reads belong to the first block, which two sublayers make: the next one opens the second
    assert grey(heat) == [0.5, 2.5]
    table = heat.images[0].get_array()
    for row, sublayer in enumerate(chain.sublayers):
        assert sublayer.read is not None
        assert table[row, : len(sublayer.read.weights)].tolist() == pytest.approx(sublayer.read.weights)
        assert table.mask[row, len(sublayer.read.weights) :].all()
    assert entropy.lines[0].get_xdata()[0] == pytest.approx(chain.sublayers[0].read.entropy)  # type: ignore[union-attr]
    assert entropy.lines[1].get_xdata()[-1] == pytest.approx(math.log(4))
    assert embedding.get_xlim() == (0, 1)
    legend = entropy.get_legend()
    legend.figure.draw_without_rendering()
    assert not legend.get_window_extent().overlaps(entropy.get_window_extent())


def test_dynamics(chain: ChainMeasure) -> None:
    panels = figures.dynamics({"one": chain, "other": chain}, "a title").axes
    for axes, field in zip(panels, ("output", "state", "gradient"), strict=True):
        assert axes.get_yscale() == "log" and "root mean square" in axes.get_ylabel()
        one, other, *_ = axes.lines
        assert list(one.get_xdata()) == [1, 2, 3, 4, 5, 6]
        assert list(one.get_ydata()) == [getattr(sublayer, field) for sublayer in chain.sublayers]
        assert one.get_color() != other.get_color() and one.get_marker() != other.get_marker()
        assert grey(axes) == [2.5, 4.5]
    assert labels(panels[-1].xaxis) == ["0.attention", "0.mlp", "1.attention", "1.mlp", "2.attention", "2.mlp"]
    assert "3 blocks" in panels[-1].get_xlabel()


def test_full_attnres_has_no_boundaries(chain: ChainMeasure) -> None:
    (full,) = measure(full_attnres(), example("nanogpt")).chains
    heat = figures.weights(full, "").axes[0]
    assert not grey(heat) and not heat.lines and heat.get_xlabel() == "source"
    # beside blocks theirs are drawn
    panels = figures.dynamics({"full": full, "blocks": chain}, "").axes
    assert grey(panels[0]) == [2.5, 4.5]
    alone = figures.dynamics({"full": full}, "").axes
    assert not grey(alone[0]) and alone[-1].get_xlabel() == "sublayer in transformer.blocks"


def full_attnres() -> torch.nn.Module:
    return ac.transform(pair("nanogpt")[0], example("nanogpt"), block_size=1, verify="off")


def test_mixing(chain: ChainMeasure) -> None:
    matrices = {**mixing.examples(6), "measured": chain.mixing()}
    panels = [axes for axes in figures.mixing(matrices, [2, 4], "a title").axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == list(matrices)
    for axes, matrix in zip(panels, matrices.values(), strict=True):
        shown = torch.as_tensor(axes.images[0].get_array().filled(0.0))
        assert torch.allclose(shown, matrix.tril())
        assert axes.images[0].get_cmap().name == "cividis"
    assert sorted(grey(panels[-1])) == [1.5, 2.5, 3.5, 4.5] and not grey(panels[0])


def test_rows_that_were_not_read_are_left_out(chain: ChainMeasure) -> None:
    first, *rest = chain.sublayers
    skipped = replace(chain, sublayers=(replace(first, read=None, gradient=math.nan), *rest))
    heat = figures.weights(skipped, "").axes[0]
    assert heat.images[0].get_array().mask[0].all()
    assert skipped.mixing()[1].isnan().all()
    figures.mixing({"measured": skipped.mixing()}, (), "")


def test_many_names_are_thinned(chain: ChainMeasure) -> None:
    deep = replace(chain, sublayers=chain.sublayers * 20, block_sizes=(6,) * 20)
    panels = figures.dynamics({"deep": deep}, "").axes
    assert len(labels(panels[-1].xaxis)) == 40 <= figures.LABELS
    assert list(itertools.islice(labels(panels[-1].xaxis), 2)) == ["0.attention", "1.mlp"]


def test_a_file_is_written_whole(chain: ChainMeasure, tmp_path: Path) -> None:
    figures.save(figures.weights(chain, "a title"), tmp_path / "weights.png")
    assert [file.name for file in tmp_path.iterdir()] == ["weights.png"]
    assert (tmp_path / "weights.png").read_bytes().startswith(b"\x89PNG")
