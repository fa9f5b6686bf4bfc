"""Pictures of measurements with matplotlib: depth weights, dynamics, depth-mixing matrices.

Colours are told apart by everybody (Okabe and Ito; cividis), and lines by their marks too. Block boundaries are lines.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from attnres_compile.analysis.measure import ChainMeasure
from attnres_compile.errors import MissingDependencyError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
MAP = "cividis"
LABELS = 48  # more names than that do not fit beside an axis
BOUNDARY: dict[str, Any] = {"color": "#888888", "linewidth": 0.8, "zorder": 0}


def weights(chain: ChainMeasure, title: str) -> Any:
    """A heat map of depth attention, reads down and sources across, with entropy and attention to the embedding.

    Args:
        chain: measured.
        title: of the picture.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    prefix, names = _short([sublayer.name for sublayer in chain.sublayers])
    reads = [sublayer.read for sublayer in chain.sublayers]
    ends, blocks = _ends(chain), len(chain.block_sizes)
    table = [[math.nan] * (blocks + 1) for _ in reads]
    open_cells = []
    for row, read in enumerate(reads):
        if read is not None:
            table[row][: len(read.weights)] = read.weights
            if read.partial:
                open_cells.append((len(read.weights) - 1, row))
    size = (max(6.4, min(14.0, 0.28 * blocks + 5.4)), max(3.6, min(13.0, 0.2 * len(reads) + 1.8)))
    figure = _figure(size)
    heat, entropy, embedding = figure.subplots(1, 3, sharey=True, width_ratios=[max(3.0, 0.2 * blocks), 1, 1])
    largest = max(weight for read in reads if read is not None for weight in read.weights)
    image = heat.imshow(table, cmap=MAP, vmin=0, vmax=largest, aspect="auto", interpolation="none")
    heat.set_title("depth attention, mean over tokens", fontsize=10)
    # In Full AttnRes every source is one sublayer, open or not.
    dotted = bool(open_cells) and blocks < len(reads) <= LABELS
    if dotted:
        columns, rows = zip(*open_cells, strict=True)
        heat.plot(columns, rows, ".", color="white", markeredgecolor="black", markersize=5, linestyle="none")
    heat.set_xlabel("source (dot: the open block's partial sum)" if dotted else "source")
    heat.set_xticks(range(blocks + 1), ["embedding", *map(str, range(1, blocks + 1))])
    heat.get_xticklabels()[0].set_rotation(90)
    if blocks > 16:
        keep = {0, *range(4, blocks + 1, 4)}
        heat.set_xticks(sorted(keep), ["embedding" if i == 0 else str(i) for i in sorted(keep)])
        heat.get_xticklabels()[0].set_rotation(90)
    # A read is named after what reads: the sublayer that comes next.
    readers = [*names[1:], "output"]
    _name_axis(heat.yaxis, readers)
    heat.set_ylabel(" in ".join(filter(None, ("read by", prefix))))
    figure.colorbar(image, ax=heat, fraction=0.08, pad=0.02)
    positions = range(len(reads))
    uniform = [math.nan if r is None else math.log(len(r.weights)) for r in reads]
    _line(entropy, [math.nan if r is None else r.entropy for r in reads], positions, 0, "measured")
    entropy.plot(uniform, positions, color="#888888", linestyle="--", linewidth=1, label="uniform")
    entropy.set_xlim(left=0)
    entropy.set_xlabel("entropy (nats)")
    entropy.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)  # the lines fill the axes
    _line(embedding, [math.nan if r is None else r.weights[0] for r in reads], positions, 1, "")
    embedding.set_xlim(0, 1)
    embedding.set_xlabel("attention to\nthe embedding")
    for axes in (heat, entropy, embedding):
        for end in ends:
            axes.axhline(end - 1.5, **{**BOUNDARY, "zorder": 2})
    figure.suptitle(title)
    return figure


def dynamics(chains: Mapping[str, ChainMeasure], title: str) -> Any:
    """Per sublayer, over depth: magnitude of its output, of the state after it, and of the loss' gradient by it.

    Args:
        chains: measured, by the names of their lines; of one depth.
        title: of the picture.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure = _figure((max(6.4, min(14.0, 0.2 * max(len(c.sublayers) for c in chains.values()) + 3)), 8.0))
    panels = figure.subplots(3, 1, sharex=True)
    labels = (
        ("output", "output of the sublayer\n(root mean square)"),
        ("state", "sum of the open block after it\n(root mean square)"),
        ("gradient", "gradient by its output\n(root mean square)"),
    )
    for axes, (field, label) in zip(panels, labels, strict=True):
        for i, (name, chain) in enumerate(chains.items()):
            values = [getattr(sublayer, field) for sublayer in chain.sublayers]
            _line(axes, range(1, len(values) + 1), values, i, name)
        axes.set_ylabel(label)
        _logarithmic(axes)
    drawn = max(chains.values(), key=lambda chain: len(_ends(chain)))
    ends = _ends(drawn)
    for axes in panels:
        for end in ends:
            axes.axvline(end + 0.5, **BOUNDARY)
    prefix, names = _short([sublayer.name for sublayer in drawn.sublayers])
    _name_axis(panels[-1].xaxis, names, first=1)
    panels[-1].tick_params(axis="x", rotation=90)
    lines = f"; grey lines: ends of {len(ends) + 1} blocks" if ends else ""
    panels[-1].set_xlabel(" in ".join(filter(None, ("sublayer", prefix))) + lines)
    panels[0].legend(frameon=False, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))  # the lines fill the axes
    figure.suptitle(title)
    return figure


def mixing(matrices: Mapping[str, Tensor], ends: Sequence[int], title: str) -> Any:
    """Depth-mixing matrices side by side: what is read after each sublayer is made of which outputs.

    Args:
        matrices: ``[L + 1, L + 1]`` by their names.
        ends: sublayers at which blocks end, drawn in the last matrix.
        title: of the picture.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure = _figure((3.1 * len(matrices) + 0.6, 3.9))
    panels = figure.subplots(1, len(matrices), sharey=True, squeeze=False)[0]
    for axes, (name, matrix) in zip(panels, matrices.items(), strict=True):
        size = matrix.shape[0]
        above = matrix.new_ones(size, size).triu(1).bool()
        largest = float(matrix.nan_to_num().abs().max())
        lowest = float(matrix.nan_to_num().min())
        shown = matrix.masked_fill(above, math.nan).numpy()
        image = axes.imshow(shown, cmap=MAP, vmin=min(0.0, lowest), vmax=largest, interpolation="none")
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("source (0: embedding)")
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=axes, orientation="horizontal", fraction=0.06, pad=0.03, shrink=0.85)
    for end in ends:
        panels[-1].axhline(end - 0.5, **{**BOUNDARY, "zorder": 2})
        panels[-1].axvline(end + 0.5, **{**BOUNDARY, "zorder": 2})
    panels[0].set_ylabel("read after sublayer")
    figure.suptitle(title)
    return figure


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure as PNG, whole or not at all."""
    partly = f"{os.fspath(path)}.part"
    figure.savefig(partly, format="png", dpi=120)
    os.replace(partly, path)


def _figure(size: tuple[float, float]) -> Any:
    try:
        module: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingDependencyError("pictures need matplotlib: pip install 'attnres-compile[plot]'") from error
    # Not through pyplot: that would choose a window system, and keep every figure.
    return module.Figure(figsize=size, layout="constrained")


def _line(axes: Any, x: Any, y: Any, number: int, label: str) -> None:
    style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKS[number % len(MARKS)]}
    axes.plot(list(x), list(y), label=label, markersize=3.5, linewidth=1.2, **style)


def _logarithmic(axes: Any) -> None:
    """A logarithmic axis with plain numbers, between the powers of ten where there would be hardly any."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}" if high < 10 * low else "")


def _ends(chain: ChainMeasure) -> list[int]:
    """Where blocks end before the last; nowhere in Full AttnRes, where every sublayer is a block."""
    return [] if set(chain.block_sizes) == {1} else list(itertools.accumulate(chain.block_sizes))[:-1]


def _name_axis(axis: Any, names: Sequence[str], first: int = 0) -> None:
    """Names along an axis, as many as fit."""
    step = math.ceil(len(names) / LABELS)
    ticks = range(0, len(names), step)
    axis.set_ticks([tick + first for tick in ticks], [names[tick] for tick in ticks], fontsize=7)


def _short(names: Sequence[str]) -> tuple[str, list[str]]:
    """What all names start with, in whole modules, and the names without it."""
    parts = [name.split(".") for name in names]
    shared = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    prefix = ".".join(column[0] for column in shared) if len(parts) > 1 else ""
    # In a name of branches side by side, each has it.
    return prefix, [name.replace(f"{prefix}.", "") if prefix else name for name in names]
