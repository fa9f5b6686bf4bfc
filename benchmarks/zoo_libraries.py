"""The models of timm, torchvision, x-transformers and ``torch.nn``, with random weights, through both routes.

Run ``python benchmarks/zoo_libraries.py`` from the repository root, where those libraries are installed. One row is the
smallest model of each module of timm and of torchvision, and each option of x-transformers' stacks and of
``torch.nn``'s transformers that touches a residual stream. Each is measured in a process of its own with a time limit.
Rows are appended to ``benchmarks/zoo-libraries.jsonl`` as they come, and a later run goes on where the file ends;
``--limit`` stops after so many, names make a part again, ``--table`` only writes ``docs/zoo-libraries.md``.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
import x_transformers
from torch import nn

from attnres_compile.capture.inputs import Inputs

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.zoo_coverage import coverage  # noqa: E402 - found through the line before
from benchmarks.zoo_rows import Row, cell, go_on, measured, moved, record, seconds, short  # noqa: E402

ROWS = ROOT / "benchmarks" / "zoo-libraries.jsonl"
RECORD, TABLE = ROOT / "benchmarks" / "zoo-libraries.json", ROOT / "docs" / "zoo-libraries.md"
LIBRARIES = ("timm", "torchvision", "x-transformers", "torch")
OUTCOMES = ("exact", "refused", "refused by verification", "not traced", "failed", "wrong", "not built", "time limit")
VOCABULARY, LENGTH, WIDTH = 100, 9, 32
IMAGE, VIDEOS = {"input_size": (3, 224, 224)}, ((3, 8, 64, 64), (3, 16, 224, 224))
SMALL = r"test|atto|femto|pico|nano|micro|mini|tiny|small|_xx?[st]|[a-z]0|_t\b|_s\b|(?<!\d)1[28](?!\d)"

STACKS: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "post-norm": {"pre_norm": False},
    "sandwich norm": {"sandwich_norm": True},
    "pre-norm and post-norm": {"pre_and_post_norm": True},
    "no final norm": {"pre_norm_has_final_norm": False},
    "RMSNorm, rotary, SwiGLU": {"use_rmsnorm": True, "rotary_pos_emb": True, "ff_glu": True, "ff_swish": True},
    "ScaleNorm": {"use_scalenorm": True},
    "simple RMSNorm": {"use_simple_rmsnorm": True},
    "dynamic tanh": {"use_dynamic_tanh": True},
    "macaron": {"macaron": True},
    "sandwich order": {"sandwich_coef": 1},
    "PAR order": {"par_ratio": 4},
    "layers called twice": {"layers_execute_order": (0, 0, 1, 1)},
    "tied layers": {"weight_tie_layers": True},
    "ALiBi": {"alibi_pos_bias": True},
    "T5 bias": {"rel_pos_bias": True},
    "residual attention": {"residual_attn": True},
    "value residual": {"add_value_residual": True},
    "shifted tokens": {"shift_tokens": 1},
    "LayerScale": {"use_layerscale": True, "layerscale_init_value": 0.1},
    "zero-init branches": {"zero_init_branch_output": True},
    "layer dropout": {"layer_dropout": 0.1},
    "scaled residual": {"scale_residual": True},
    "residual times a constant": {"scale_residual_constant": 0.5},
    "gated residual": {"gate_residual": True},
    "orthogonal residual": {"orthog_residual": True},
    "U-Net skips": {"unet_skips": True},
    "re-injected input": {"reinject_input": True},
    "gated re-injection": {"reinject_input": True, "learned_reinject_input_gate": True},
    "integrated layers": {"integrate_layers": True},
    "attention residuals": {"attn_aggregated_residuals": True, "attn_aggregated_residual_kwargs": {"lora_rank": 8}},
    "hyper-connections": {"num_residual_streams": 4},
}
HEADER = """# Models of other libraries

Random weights, nothing downloaded: the smallest model of each module of timm {timm} and torchvision {torchvision}, the
options of x-transformers {x-transformers} that touch a residual stream, and `torch.nn`'s transformers, on PyTorch
{torch}. *live* is the transformed module, compared at two shapes; *graph* the rewritten exported program. In brackets
the adds of each chain, all of which the running model was seen to push; then the largest relative error of any output
in fp32 with zero queries, `block_size=3`, or in fp64 (\\*) where random parameters amplify every rounding. Seconds are
those of one core of a machine that did other work too. Written by `python benchmarks/zoo_libraries.py`, which goes on
where it was stopped: the table has the rows of so far{left}.

"""


def builders() -> dict[str, Callable[[], tuple[str, nn.Module, Inputs]]]:
    """What makes the model of each row, by name: the model's own name, the model, and a call that it takes."""
    found: dict[str, Callable[[], tuple[str, nn.Module, Inputs]]] = {}
    for module in timm.list_modules():
        found[f"timm {module}"] = partial(_image_model, timm.list_models(module=module), timm.create_model)
    for module, names in _torchvision().items():
        found[f"torchvision {module}"] = partial(_image_model, names, torchvision.models.get_model)
    for name, options in STACKS.items():
        found[f"x-transformers decoder, {name}"] = partial(_decoder, options)
    found |= {
        "x-transformers encoder": _encoder,
        "x-transformers encoder of images": _vit,
        "x-transformers encoder of vectors": _continuous,
        "x-transformers encoder and decoder": _encoder_and_decoder,
    }
    for norm_first in (True, False):
        order = "pre-norm" if norm_first else "post-norm"
        found[f"torch TransformerEncoder, {order}"] = partial(_torch_encoder, norm_first)
        found[f"torch TransformerDecoder, {order}"] = partial(_torch_decoder, norm_first)
        found[f"torch Transformer, {order}"] = partial(_torch_both, norm_first)
    return found


def _torchvision() -> dict[str, list[str]]:
    """The classifiers of images and of videos by module."""
    names = torchvision.models.list_models(torchvision.models) + torchvision.models.list_models(
        torchvision.models.video
    )
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        module = torchvision.models.get_model_builder(name).__module__
        found[module.removeprefix("torchvision.models.")].append(name)
    return dict(found)


def _image_model(names: list[str], make: Callable[[str], nn.Module]) -> tuple[str, nn.Module, Inputs]:
    """The one with the fewest parameters; where names say that some are small, only those are looked at."""
    sizes: dict[str, int] = {}
    for name in [name for name in names if re.search(SMALL, name)] or names:
        with torch.device("meta"), contextlib.suppress(Exception):  # some compute with values when they are made
            sizes[name] = sum(parameter.numel() for parameter in make(name).parameters())
    name = min(sizes or names, key=lambda name: sizes.get(name, 0))
    torch.manual_seed(0)
    model = make(name)
    sizes_of = VIDEOS if ".video." in type(model).__module__ else (getattr(model, "default_cfg", IMAGE)["input_size"],)
    inputs = [torch.randn(1, *shape) for shape in sizes_of]
    return name, model, Inputs((next(x for x in inputs if x is inputs[-1] or _takes(model, x)),), {})


def _takes(model: nn.Module, x: torch.Tensor) -> bool:
    with contextlib.suppress(RuntimeError), torch.no_grad():
        model.eval()(x)
        return True
    return False


def _tokens() -> torch.Tensor:
    return torch.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % VOCABULARY


def _vectors(length: int = LENGTH) -> torch.Tensor:
    return torch.randn(2, length, WIDTH)


def _stack(kind: type[nn.Module], **options: Any) -> nn.Module:
    return kind(dim=WIDTH, depth=2, heads=2, attn_dim_head=16, **options)


def _decoder(options: dict[str, Any]) -> tuple[str, nn.Module, Inputs]:
    stack = _stack(x_transformers.Decoder, **options)
    model = x_transformers.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=stack)
    return "Decoder", model, Inputs((_tokens(),), {})


def _encoder() -> tuple[str, nn.Module, Inputs]:
    stack = _stack(x_transformers.Encoder)
    model = x_transformers.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=stack)
    return "Encoder", model, Inputs((_tokens(),), {})


def _vit() -> tuple[str, nn.Module, Inputs]:
    stack = _stack(x_transformers.Encoder)
    model = x_transformers.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=10, attn_layers=stack)
    return "ViTransformerWrapper", model, Inputs((torch.randn(2, 3, 32, 32),), {})


def _continuous() -> tuple[str, nn.Module, Inputs]:
    stack = _stack(x_transformers.Encoder)
    model = x_transformers.ContinuousTransformerWrapper(dim_in=8, dim_out=8, max_seq_len=LENGTH, attn_layers=stack)
    return "ContinuousTransformerWrapper", model, Inputs((torch.randn(2, LENGTH, 8),), {})


def _encoder_and_decoder() -> tuple[str, nn.Module, Inputs]:
    sizes = {"num_tokens": VOCABULARY, "depth": 2, "heads": 2, "max_seq_len": LENGTH}
    parts = {f"{part}_{name}": value for part in ("enc", "dec") for name, value in sizes.items()}
    return "XTransformer", x_transformers.XTransformer(dim=WIDTH, **parts), Inputs((_tokens(), _tokens()), {})


def _torch_options(norm_first: bool) -> dict[str, Any]:
    return {"d_model": WIDTH, "nhead": 2, "dim_feedforward": 48, "batch_first": True, "norm_first": norm_first}


def _torch_encoder(norm_first: bool) -> tuple[str, nn.Module, Inputs]:
    layer = nn.TransformerEncoderLayer(**_torch_options(norm_first))
    return "TransformerEncoder", nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH)), Inputs((_vectors(),), {})


def _torch_decoder(norm_first: bool) -> tuple[str, nn.Module, Inputs]:
    layer = nn.TransformerDecoderLayer(**_torch_options(norm_first))
    model = nn.TransformerDecoder(layer, 2, nn.LayerNorm(WIDTH))
    return "TransformerDecoder", model, Inputs((_vectors(), _vectors(5)), {})


def _torch_both(norm_first: bool) -> tuple[str, nn.Module, Inputs]:
    model = nn.Transformer(num_encoder_layers=2, num_decoder_layers=2, **_torch_options(norm_first))
    return "Transformer", model, Inputs((_vectors(5), _vectors()), {})


def measure(row: Row) -> Row:
    """The row of one model."""

    def build() -> tuple[nn.Module, Inputs]:
        torch.manual_seed(0)
        row["model"], model, inputs = builders()[row["name"]]()
        return moved(model), inputs

    return measured(row, build)


def main() -> None:
    """Measure what has no row yet, then write the table."""
    every: dict[str, Row] = {name: {"name": name, "model": ""} for name in builders()}
    found = go_on(__doc__, every, ROWS, measure)
    write([found[name] for name in every if name in found])


def write(found: list[Row]) -> None:
    """The table, the counts, and the rows as JSON."""
    versions = {library: importlib.metadata.version(library) for library in LIBRARIES}
    unmeasured = len(builders().keys() - {row["name"] for row in found})
    header = HEADER.format_map(versions | {"left": f", {unmeasured} are left" if unmeasured else ""})
    sections = [_section(library, found) for library in LIBRARIES]
    TABLE.write_text(header + _counts(found) + coverage(found) + "".join(sections))
    counts = {library: Counter(row["status"] for row in _of(library, found)) for library in LIBRARIES}
    record(RECORD, {"versions": versions, "counts": counts, "rows": found})


def _of(library: str, found: list[Row]) -> list[Row]:
    return [row for row in found if row["name"].partition(" ")[0] == library]


def _counts(found: list[Row]) -> str:
    outcomes = [outcome for outcome in OUTCOMES if any(row["status"] == outcome for row in found)]
    lines = [f"| library | {' | '.join(outcomes)} |", "| --- " * (len(outcomes) + 1) + "|"]
    for library in LIBRARIES:
        counts = Counter(row["status"] for row in _of(library, found))
        lines.append(f"| {library} | {' | '.join(str(counts[outcome]) for outcome in outcomes)} |")
    return "\n".join(lines) + "\n\n## Coverage\n\n"


def _section(library: str, found: list[Row]) -> str:
    lines = [f"\n## {library}\n", "| what | model | live | graph | seconds |", "| --- | --- | --- | --- | --- |"]
    for row in sorted(_of(library, found), key=lambda row: OUTCOMES.index(row["status"])):
        routes = (cell(row["live"]), cell(row["graph"]), seconds(row)) if "live" in row else ()
        cells = routes or (f"{row['status']}: {short(row['reason'])}", "", "")
        name = row["name"].removeprefix(library).strip() + " \\*" * ("dtype" in row)
        lines.append(f"| {name} | {row['model']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
