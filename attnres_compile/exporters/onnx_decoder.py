"""A decoder's step with its key-value cache as inputs and outputs, for a runtime that generates token by token."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attnres_compile.errors import InputError, MissingDependencyError
from attnres_compile.exporters.example_call import evaluated
from attnres_compile.exporters.onnx import Body, OnnxExport, Target, export_onnx

# Of the example: none of them equal, so that no two axes are taken for the same, and none of them 1.
_BATCH, _PAST, _LENGTH = 2, 3, 4


def export_onnx_decoder(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    opset_version: int = 23,
    atol: float | None = 1e-4,
    target: Target = "onnxruntime",
    body: Body | None = None,
    echo: Callable[[str], None] | None = print,
) -> OnnxExport:
    """Export a decoder of ``transformers`` to one ONNX file that serves the prompt and each further token.

    Inputs are ``input_ids [batch, length]``, ``attention_mask [batch, past + length]`` (0 for padding on the
    left), and the cache,
    ``past_key_<layer>`` and ``past_value_<layer>``, ``[batch, heads, past, features]`` each; ``past`` is 0 for the
    prompt. Outputs are ``logits [batch, length, vocabulary]``, and ``present_key_<layer>`` and
    ``present_value_<layer>``, the next call's cache. Depth attention keeps nothing between tokens: the cache is the
    original model's.

    Args:
        model: a decoder whose ``forward`` takes ``input_ids``, ``attention_mask``, ``use_cache`` and a cache, and which
            keeps keys and values of every layer there.
        path: the file; an existing one is replaced.
        opset_version: as for ``export_onnx``, as are all the other options.
        atol: largest absolute difference between ONNX Runtime and PyTorch; None does not compare.
        target: the runtime whose measurements choose the schedule and ``body``.
        body: form of the functions behind the nodes.
        echo: takes lines on progress; None for silence.

    Returns:
        What was written.

    Raises:
        MissingDependencyError: transformers or a package for ONNX is missing.
        InputError: the model takes no such cache.
        ExportError, OptionError: as for ``export_onnx``.
    """
    with evaluated(model), torch.no_grad():
        past = _example_cache(model)
    parameter = next(model.parameters())
    vocabulary = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    ids = torch.arange(_BATCH * _LENGTH, device=parameter.device).view(_BATCH, _LENGTH) % vocabulary
    mask = torch.ones(_BATCH, _PAST + _LENGTH, dtype=torch.int64, device=parameter.device)
    cached = {0: "batch", 2: "past"}
    return export_onnx(
        _Step(model),
        {"input_ids": ids, "attention_mask": mask, "past": past},
        path,
        dynamic_shapes={
            "input_ids": {0: "batch", 1: "length"},
            "attention_mask": {0: "batch", 1: "total"},
            "past": dict.fromkeys(past, cached),
        },
        opset_version=opset_version,
        atol=atol,
        target=target,
        body=body,
        echo=echo,
    )


class _Step(nn.Module):
    """The model's step as a function of tensors: the cache in, the cache out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.attnres_report = getattr(model, "attnres_report", None)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers import DynamicCache

        pairs = [(past[f"key_{i}"], past[f"value_{i}"]) for i in range(len(past) // 2)]
        cache = DynamicCache(pairs)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, _cache_argument(self.model): cache}
        if "position_ids" in inspect.signature(self.model.forward).parameters:
            # As `generate` counts them: padding on the left has no position.
            positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
            inputs["position_ids"] = positions[:, -input_ids.shape[1] :]
        result = self.model(**inputs, use_cache=True)
        return {"logits": result.logits} | {f"present_{name}": value for name, value in _tensors(cache).items()}


def _tensors(cache: Any) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for i, layer in enumerate(cache.layers):
        named |= {f"key_{i}": layer.keys, f"value_{i}": layer.values}
    return named


def _example_cache(model: nn.Module) -> dict[str, Tensor]:
    """What the model itself keeps of a few tokens."""
    try:
        from transformers import DynamicCache
    except ImportError as error:
        raise MissingDependencyError(
            f"the decoder's cache needs transformers, which cannot be imported ({error}): "
            "pip install 'attnres-compile[hf]'"
        ) from error
    device = next(model.parameters()).device
    ids = torch.arange(_BATCH * _PAST, device=device).view(_BATCH, _PAST)
    cache, argument = DynamicCache(), _cache_argument(model)
    try:
        model(**{"input_ids": ids, argument: cache}, use_cache=True)
        return _tensors(cache)
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"{type(model).__name__} does not keep keys and values of every layer in `{argument}`: {error}"
        ) from error


def _cache_argument(model: nn.Module) -> str:
    """What ``forward`` calls its cache, which depends on the version of transformers."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise InputError(f"{type(model).__name__}.forward takes no cache of keys and values (past_key_values)")
