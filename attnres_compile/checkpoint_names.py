"""Reads under the parameter names of other codebases: Kimi K3's checkpoints and flash-linear-attention's models.

Both keep, per decoder layer, a projection (the pseudo-query ``[1, d]``) and a norm (the key-norm weight ``[d]``) before
attention and another pair before the MLP, and one pair before the head. Here these are rows of ``[L, d]``: the state
after ``r`` sublayers is read with row ``r - 1``. The first read has one source, hence no row; its pair changes nothing.

Both compute the paper's weighted mean. A model transformed with ``preserve=True`` multiplies each read by its number of
sources, which only readers that are not scale-invariant (and their eps) can tell. Block sizes are not part of a state
dict: FLA counts sublayers as here, K3 decoder layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnres_compile.errors import InputError, OptionError
from attnres_compile.reads import DepthReads
from attnres_compile.training import read_modules


class _Names(NamedTuple):
    attention: str
    mlp: str
    output: str


Layout = Literal["k3", "fla"]
LAYOUTS: dict[str, _Names] = {
    "k3": _Names("layers.{}.self_attention_res_", "layers.{}.mlp_res_", "output_attn_res_"),
    "fla": _Names("layers.{}.attn_res_", "layers.{}.mlp_res_", "res_"),
}


def export_reads(model: nn.Module, layout: Layout, *, chain: int = 0, prefix: str = "model.") -> dict[str, Tensor]:
    """The reads of one chain under another codebase's names.

    Args:
        model: what ``transform`` returned: a decoder whose layers have two sublayers, attention and MLP.
        layout: "k3" or "fla".
        chain: index of the chain's reads.
        prefix: before every name, as ``"model."`` or ``"language_model.model."``.

    Returns:
        Copies: ``...proj.weight [1, d]`` and ``...norm.weight [d]`` per read, in the reads' dtype.

    Raises:
        InputError: the model has no such reads, or an odd number of sublayers.
        OptionError: another layout.
    """
    reads = _reads(model, chain)
    width = reads.query.shape[1]
    state: dict[str, Tensor] = {}
    for row, name in enumerate(_names(reads, layout, prefix), start=-1):
        query = torch.zeros(width) if row < 0 else reads.query[row].detach()
        norm = torch.ones(width) if row < 0 or reads.key_norm is None else reads.key_norm[row].detach()
        state[f"{name}proj.weight"] = query.to(reads.query).reshape(1, width).clone()
        state[f"{name}norm.weight"] = norm.to(reads.query).clone()
    return state


def import_reads(
    model: nn.Module, state: Mapping[str, Tensor], layout: Layout, *, chain: int = 0, prefix: str = "model."
) -> None:
    """Set the reads of one chain from another codebase's state dict; its other entries are not looked at.

    Without key norm, the norms' weights are folded into the queries, which computes the same.

    Args:
        model: as for ``export_reads``; transform it with the block size that the state dict was trained with.
        state: has every name that ``export_reads`` would give.
        layout: as for ``export_reads``.
        chain: as for ``export_reads``.
        prefix: as for ``export_reads``.

    Raises:
        InputError: names are missing, belong to a deeper model, or have another shape; nothing is changed then.
        OptionError: another layout.
    """
    reads = _reads(model, chain)
    width, names = reads.query.shape[1], _names(reads, layout, prefix)
    wanted = [f"{name}{part}.weight" for name in names for part in ("proj", "norm")]
    missing = [name for name in wanted if name not in state]
    if missing:
        raise InputError(f"{len(missing)} of {len(wanted)} names of {layout!r} are missing, the first is {missing[0]}")
    deeper = f"{prefix}{LAYOUTS[layout].attention.format(len(names) // 2)}proj.weight"
    if deeper in state:
        raise InputError(f"the state dict is of a deeper model: it has {deeper}")
    for name in wanted:
        if state[name].numel() != width:
            raise InputError(f"{name} has shape {tuple(state[name].shape)}, and {width} features are needed")
    queries, norms = (
        torch.stack([state[f"{name}{part}.weight"].reshape(width) for name in names[1:]]) for part in ("proj", "norm")
    )
    with torch.no_grad():
        if reads.key_norm is None:
            queries = queries * norms
        else:
            reads.key_norm.copy_(norms)
        reads.query.copy_(queries)


def _reads(model: nn.Module, chain: int) -> DepthReads:
    paths = read_modules(model)
    if not 0 <= chain < len(paths):
        raise InputError(f"chain {chain} was asked for, and {type(model).__name__} has {len(paths)}, from 0 on")
    reads = model.get_submodule(paths[chain])
    assert isinstance(reads, DepthReads)
    return reads


def _names(reads: DepthReads, layout: str, prefix: str) -> list[str]:
    """Per read, the first one too, what its two names start with."""
    if layout not in LAYOUTS:
        raise OptionError(f"layout is one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}")
    sublayers = reads.query.shape[0]
    if sublayers % 2:
        raise InputError(
            f"{sublayers} sublayers are no sequence of attention and MLP pairs, which the names of {layout!r} stand for"
        )
    attention, mlp, output = LAYOUTS[layout]
    pairs = [name.format(layer) for layer in range(sublayers // 2) for name in (attention, mlp)]
    return [prefix + name for name in (*pairs, output)]
