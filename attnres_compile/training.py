"""What a training loop asks for: which parameters train, and how an optimiser groups them."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from attnres_compile.errors import InputError, OptionError
from attnres_compile.reads import DepthReads


def read_modules(model: nn.Module) -> list[str]:
    """Paths of the modules that hold the reads, one per chain: what PEFT takes as ``modules_to_save``.

    Args:
        model: what ``transform`` returned.

    Raises:
        InputError: the model has no reads.
    """
    found = [name for name, module in model.named_modules() if isinstance(module, DepthReads)]
    if not found:
        raise InputError(f"{type(model).__name__} has no reads: pass what attnres_compile.transform returned")
    return found


def trainable_parameters(model: nn.Module, which: Literal["attnres", "all"] = "attnres") -> list[nn.Parameter]:
    """Choose what trains: sets ``requires_grad`` of every parameter.

    PEFT sets it for its own models: there ``modules_to_save=read_modules(model)`` makes the reads train.

    Args:
        model: what ``transform`` returned, also wrapped (DDP, FSDP).
        which: "attnres" trains the pseudo-queries and key norms alone, "all" every floating-point parameter.

    Returns:
        The parameters that train now, in the order of ``model.parameters()``.

    Raises:
        InputError: the model has no reads.
        OptionError: ``which`` is something else.
    """
    if which not in ("attnres", "all"):
        raise OptionError(f"which is 'attnres' or 'all', got {which!r}")
    reads = _read_parameters(model)
    for parameter in model.parameters():
        trains = id(parameter) in reads or (which == "all" and parameter.is_floating_point())
        parameter.requires_grad_(trains)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer_groups(
    model: nn.Module, *, weight_decay: float, lr: float | None = None, read_lr: float | None = None
) -> list[dict[str, Any]]:
    """Parameter groups for an optimiser: matrices decay; vectors, pseudo-queries and key norms do not.

    Decay would pull a query back to uniform attention and a key norm to zero, and a table of them ``[L, d]`` looks
    like a matrix to the usual rules.

    Args:
        model: what ``transform`` returned, also wrapped (DDP, FSDP, PEFT).
        weight_decay: of the matrices.
        lr: learning rate of the model's own parameters; None leaves it to the optimiser's default.
        read_lr: learning rate of the reads; None is as ``lr``.

    Returns:
        Groups with ``params``, ``weight_decay``, ``name`` ("matrices", "vectors", "attnres") and perhaps ``lr``, over
        the parameters that require grad; groups without any are left out.

    Raises:
        InputError: the model has no reads.
    """
    reads = _read_parameters(model)
    matrices: dict[str, Any] = {"name": "matrices", "params": [], "weight_decay": weight_decay}
    vectors: dict[str, Any] = {"name": "vectors", "params": [], "weight_decay": 0.0}
    attnres: dict[str, Any] = {"name": "attnres", "params": [], "weight_decay": 0.0}
    for parameter in model.parameters():
        if parameter.requires_grad:
            own = matrices if parameter.ndim > 1 else vectors
            (attnres if id(parameter) in reads else own)["params"].append(parameter)
    for group, rate in ((matrices, lr), (vectors, lr), (attnres, lr if read_lr is None else read_lr)):
        if rate is not None:
            group["lr"] = rate
    return [group for group in (matrices, vectors, attnres) if group["params"]]


def _read_parameters(model: nn.Module) -> set[int]:
    return {id(parameter) for name in read_modules(model) for parameter in model.get_submodule(name).parameters()}
