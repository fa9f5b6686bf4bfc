"""``attnres plot``: pictures of models that are on disk, and one page with all of them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import nn

from attnres_compile.analysis import figures, mixing
from attnres_compile.analysis.measure import ChainMeasure, Measurement
from attnres_compile.analysis.page import write_page
from attnres_compile.capture.inputs import normalise
from attnres_compile.cli_models import Loaded
from attnres_compile.errors import InputError
from attnres_compile.pretrained import as_input_error

Kind = Literal["weights", "dynamics", "mixing", "all"]
LONGEST_TEXT = 512  # tokens


def inputs_of(loaded: Loaded, model: nn.Module, text: Path | None) -> dict[str, Any] | Any:
    """What a model is measured on: a text, its own example inputs, or ones made from its config.

    A language model gets its tokens as labels, too.

    Raises:
        InputError: a text was given, and the model is none from a directory with a tokenizer.
    """
    if text is not None:
        inputs: Any = dict(_tokens(loaded, text))
    elif loaded.example_inputs is not None:
        return loaded.example_inputs
    else:
        inputs = normalise(model, None).kwargs
    if type(model).__name__.endswith("ForCausalLM") and "input_ids" in inputs:
        inputs["labels"] = inputs["input_ids"]
    return inputs


def label(name: str, taken: Collection[str]) -> str:
    """A model's name without the folders before it, as far as that tells it from the others."""
    short = name.rstrip("/").rpartition("/")[2]
    return name if short in taken else short


def _tokens(loaded: Loaded, text: Path) -> Any:
    if loaded.directory is None:
        raise InputError(f"--text needs a model with a tokenizer, as hf:DIRECTORY; got {loaded.name}")
    from transformers import AutoTokenizer

    files = {"gguf_file": loaded.gguf} if loaded.gguf else {}
    with as_input_error(f"{text} cannot be read with the tokenizer of {loaded.directory}"):
        tokenizer: Any = AutoTokenizer.from_pretrained(
            loaded.directory, local_files_only=True, trust_remote_code=False, **files
        )
        content = text.read_text(encoding="utf-8")
        return tokenizer(content, return_tensors="pt", truncation=True, max_length=LONGEST_TEXT)


def write(kind: Kind, measurements: Mapping[str, Measurement], folder: Path) -> list[Path]:
    """Write the pictures of a kind, and ``index.html`` with all of them; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    chains = {
        f"{name}, chain {i} ({chain.container or 'the model itself'})" if len(found.chains) > 1 else name: chain
        for name, found in measurements.items()
        for i, chain in enumerate(found.chains)
    }
    pictures: dict[Path, str] = {}

    def add(name: str, figure: Any, caption: str) -> None:
        path = folder / f"{name}.png"
        figures.save(figure, path)
        pictures[path] = caption

    for number, (name, chain) in enumerate(chains.items(), 1):
        suffix = f"-{number}" if len(chains) > 1 else ""
        if kind in ("weights", "all"):
            caption = f"Depth attention of {name}: the mean over tokens of what each read takes from each source."
            add(f"weights{suffix}", figures.weights(chain, f"Depth attention: {name}"), caption)
        if kind in ("mixing", "all"):
            caption = (
                f"Depth mixing of {name}, measured, beside other forms of residual streams with made-up weights: row l "
                "is what is read after l sublayers, as a sum of the embedding and the sublayers' outputs."
            )
            add(f"mixing{suffix}", _mixing(chain, name), caption)
    if kind in ("dynamics", "all"):
        caption = f"Magnitudes and gradients over depth; gradients of {_of_what(measurements)}."
        for number, group in enumerate(_equally_deep(chains), 1):
            add("dynamics" + (f"-{number}" if number > 1 else ""), figures.dynamics(group, "Dynamics"), caption)
    page = folder / "index.html"
    write_page(page, ", ".join(measurements), pictures)
    return [*pictures, page]


def _mixing(chain: ChainMeasure, name: str) -> Any:
    ends = list(itertools.accumulate(chain.block_sizes))
    matrices = {**mixing.examples(len(chain.sublayers)), "AttnRes, measured": chain.mixing()}
    return figures.mixing(matrices, ends[:-1], f"Depth mixing: {name}")


def _equally_deep(chains: Mapping[str, ChainMeasure]) -> list[dict[str, ChainMeasure]]:
    groups: dict[int, dict[str, ChainMeasure]] = {}
    for name, chain in chains.items():
        groups.setdefault(len(chain.sublayers), {})[name] = chain
    return list(groups.values())


def _of_what(measurements: Mapping[str, Measurement]) -> str:
    losses = {found.loss is not None for found in measurements.values()}
    return "the loss" if losses == {True} else "a fixed random projection of the outputs"
