"""A copy of a model that shares its parameters, so that nothing done to the copy is seen on the original."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from attnres_compile.errors import RefusedError


def shared_copy(model: nn.Module) -> nn.Module:
    """Copy every module, hook, buffer and attribute; the parameters are the original's own.

    Raises:
        RefusedError: something in the model cannot be copied.
    """
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise RefusedError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}); analysis and verification run "
            "on a copy, so make the attribute at fault deep-copyable (a tensor with a graph: detach it)"
        ) from error
