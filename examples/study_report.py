"""Tables and pictures of the runs of ``train_from_scratch.py``: a Markdown file, PNGs, and a page with all of them."""

import itertools
import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from attnres_compile.analysis import ChainMeasure, ReadMeasure, SublayerMeasure, figures, mixing
from attnres_compile.analysis.page import write_page

Found = dict[str, Any]
RESIDUAL = "residual"


def report(folder: Path) -> None:
    """Write ``results.md``, the pictures and ``index.html`` from the JSON files under ``runs``."""
    found = [json.loads(file.read_text()) for file in sorted((folder / "runs").glob("*.json"))]
    widest = max(entry["run"]["width"] for entry in found)
    every_rate = [entry for entry in found if entry["run"]["width"] == widest]
    # All others were trained at the rate of the standard stream's best run.
    tuned = [entry for entry in every_rate if entry["label"] == RESIDUAL and entry["run"]["seed"] == 0]
    lr = min(tuned, key=total)["run"]["lr"]
    main = [entry for entry in every_rate if entry["run"]["lr"] == lr]
    # Those with the most seeds, as many as a picture can hold.
    most = sorted(by_label(main), key=lambda item: -len(item[1]))[:4]
    compared = [label for label, _ in most]
    chains = {label: chain_of(group[0]) for label, group in by_label(main) if label in compared}
    pictures: dict[Path, str] = {}

    def add(name: str, figure: Any, caption: str) -> None:
        figures.save(figure, folder / f"{name}.png")
        pictures[folder / f"{name}.png"] = caption

    add("curves", curves(main, compared), "Held-out loss while training: mean over seeds, and from least to largest.")
    caption = "Magnitudes and gradients over depth, after training, on held-out code, seed 0."
    add("dynamics", figures.dynamics(chains, "Dynamics"), caption)
    for i, (label, chain) in enumerate(item for item in chains.items() if item[0] != RESIDUAL):
        add(f"weights-{i}", figures.weights(chain, label), f"What each read attends to: {label}, seed 0.")
    matrices = {label: chain.mixing() for label, chain in reversed(chains.items()) if label != RESIDUAL}
    if matrices:
        last = chains[[*matrices][-1]]
        ends = list(itertools.accumulate(last.block_sizes))[:-1]
        shown = {**mixing.examples(len(last.sublayers)), **matrices}
        caption = "Depth mixing: AttnRes as trained; the other forms have made-up weights, to show their structure."
        add("mixing", figures.mixing(shown, ends, "Depth mixing"), caption)
    sweep = {entry["run"]["block_size"]: entry for entry in main if entry["run"]["seed"] == 0}
    if len(sweep) > 3:
        add("block-size", block_sizes(sweep), "Held-out loss by the size of a block, one seed.")
    tables = [*table(main, found), "", *depth_table([entry for entry in main if entry["label"] in compared])]
    introduction = settings(main[0]["run"], tuned)
    text = "\n".join(["# From scratch", "", *introduction, "", *tables, ""])
    (folder / "results.md").write_text(text)
    write_page(folder / "index.html", "Attention Residuals from scratch", pictures, " ".join(introduction))
    print(text)


def by_label(found: list[Found]) -> list[tuple[str, list[Found]]]:
    """Groups of runs that differ by their seeds alone: the standard stream, then from large blocks to small ones."""

    def order(entry: Found) -> tuple[float, int]:
        return -(entry["run"]["block_size"] or math.inf), entry["run"]["seed"]

    ordered = sorted(found, key=order)
    return [(label, list(group)) for label, group in itertools.groupby(ordered, key=lambda entry: entry["label"])]


def total(entry: Found) -> float:
    """Held-out nats per byte, code and prose alike."""
    return statistics.mean(entry["held_out"].values())


def settings(run: Found, tuned: list[Found]) -> list[str]:
    tokens = run["steps"] * run["batch"] * run["length"]
    rates = ", ".join(f"{e['run']['lr']:g}: {total(e):.4f}" for e in sorted(tuned, key=lambda e: e["run"]["lr"]))
    return [
        f"{run['layers']} layers ({2 * run['layers']} sublayers) of width {run['width']}, bytes of Python's library",
        f"and documentation, {run['steps']} steps of {run['batch']} × {run['length']} bytes ({tokens:,} in all),",
        f"AdamW at {run['lr']:g}, the best of the rates tried for the standard stream",
        f"({rates}).",
        "Losses are nats per byte on held-out files and topics; a seed gives the same weights and batches to all.",
    ]


def table(main: list[Found], found: list[Found]) -> list[str]:
    groups = dict(by_label(main))
    plain = {entry["run"]["seed"]: total(entry) for entry in groups[RESIDUAL]}
    header = ["stream", "seeds", "code", "prose", "mean", "against residual, same seed"]
    lines = [f"| {' | '.join(header)} |", "|" + " --- |" * len(header)]
    for label, group in groups.items():
        differences = [total(entry) - plain[entry["run"]["seed"]] for entry in group if entry["run"]["seed"] in plain]
        size = group[0]["run"]["block_size"]
        columns = [f"{label} (S = {size})" if size > 1 else label, str(len(group))]
        columns += [spread([entry["held_out"][part] for entry in group]) for part in ("code", "prose")]
        columns += [spread(list(map(total, group))), "" if label == RESIDUAL else spread(differences, "+.4f")]
        lines.append(f"| {' | '.join(columns)} |")
    lines += ["", "Where there are several seeds: mean ± standard deviation of one run."]
    widths = sorted({entry["run"]["width"] for entry in found})
    if len(widths) > 1:
        lines += ["", "| width, one seed | residual | Block AttnRes | difference |", "| --- | --- | --- | --- |"]
        lr = main[0]["run"]["lr"]
        for width in widths:
            same = [e for e in found if (e["run"]["width"], e["run"]["seed"], e["run"]["lr"]) == (width, 0, lr)]
            losses = {entry["run"]["block_size"]: total(entry) for entry in same}
            if losses.keys() >= {0, 6}:
                lines.append(f"| {width} | {losses[0]:.4f} | {losses[6]:.4f} | {losses[6] - losses[0]:+.4f} |")
    return lines


def depth_table(found: list[Found]) -> list[str]:
    """How far things spread over depth, from the dynamics picture's numbers."""
    header = ["stream", "largest sum of an open block", "output, largest / smallest", "gradient, largest / smallest"]
    lines = [f"| {' | '.join(header)} |", "|" + " --- |" * len(header)]
    for label, group in by_label(found):
        sublayers = [entry["depth"]["chains"][0]["sublayers"] for entry in group]
        columns = [spread([max(layer["state"] for layer in layers) for layers in sublayers], ".3g")]
        for field in ("output", "gradient"):
            values = [[layer[field] for layer in layers] for layers in sublayers]
            columns.append(spread([max(each) / min(each) for each in values], ".3g"))
        lines.append(f"| {label} | {' | '.join(columns)} |")
    return [*lines, "", "Root mean squares per sublayer; the one block of the standard stream is the stream itself."]


def seeds(group: list[Found]) -> str:
    return f"{len(group)} seeds" if len(group) > 1 else "1 seed"


def spread(values: list[float], form: str = ".4f") -> str:
    mean = format(statistics.mean(values), form)
    return mean if len(values) < 2 else f"{mean} ± {format(statistics.stdev(values), form.lstrip('+'))}"


def curves(main: list[Found], compared: list[str]) -> Figure:
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    for i, (label, group) in enumerate(item for item in by_label(main) if item[0] in compared):
        steps = [point["step"] for point in group[0]["curve"]]
        losses = list(zip(*([(p["code"] + p["prose"]) / 2 for p in entry["curve"]] for entry in group), strict=True))
        colour, means = figures.COLOURS[i], list(map(statistics.mean, losses))
        axes.plot(steps, means, color=colour, marker=figures.MARKS[i], label=f"{label} ({seeds(group)})")
        axes.fill_between(steps, list(map(min, losses)), list(map(max, losses)), color=colour, alpha=0.2)
    axes.set_xlabel("steps")
    axes.set_ylabel("held-out loss (nats per byte)")
    # The first evaluations are of untrained models, all alike.
    low, later = min(map(total, main)), main[0]["curve"][1]
    axes.set_ylim(low - 0.05, (later["code"] + later["prose"]) / 2 + 0.2)
    axes.legend(frameon=False)
    return figure


def block_sizes(sweep: dict[int, Found]) -> Figure:
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    sizes = sorted(size for size in sweep if size)
    axes.plot(sizes, [total(sweep[size]) for size in sizes], marker="o", color=figures.COLOURS[0], label="AttnRes")
    axes.axhline(total(sweep[0]), color=figures.COLOURS[1], linestyle="--", label="residual")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("sublayers in a block (1: Full AttnRes)")
    axes.set_ylabel("held-out loss (nats per byte)")
    axes.legend(frameon=False)
    return figure


def chain_of(entry: Found) -> ChainMeasure:
    (plain,) = entry["depth"]["chains"]

    def sublayers() -> Iterable[SublayerMeasure]:
        for fields in plain["sublayers"]:
            read = fields["read"] and ReadMeasure(**{**fields["read"], "weights": tuple(fields["read"]["weights"])})
            yield SublayerMeasure(**{**fields, "read": read})

    return ChainMeasure(**{**plain, "block_sizes": tuple(plain["block_sizes"]), "sublayers": tuple(sublayers())})
