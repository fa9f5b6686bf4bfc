"""Example inputs: what the user may give, what is taken where nothing is given, and a second shape."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attnres_compile.errors import InputError


class Inputs(NamedTuple):
    """Positional and keyword arguments of one forward call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def fresh(self) -> Inputs:
        """The same with copies of the tensors: a model may change its inputs in place."""
        return Inputs(*pytree.tree_map_only(Tensor, _copied, (self.args, self.kwargs)))


def normalise(model: nn.Module, example_inputs: Any) -> Inputs:
    """One forward call from what a user passes as ``example_inputs``.

    Args:
        model: a Hugging Face model may go without example inputs: they are made from its config.
        example_inputs: a tensor, a tuple of positional arguments, a mapping of keyword arguments (such as a
            ``transformers.BatchEncoding``), or None.

    Raises:
        InputError: there are none and none can be made, or the type is another one.
    """
    if example_inputs is None:
        inputs = Inputs((), _from_config(model))
    elif isinstance(example_inputs, Tensor):
        inputs = Inputs((example_inputs,), {})
    elif isinstance(example_inputs, Mapping):
        inputs = Inputs((), dict(example_inputs))
    elif isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
        inputs = Inputs(tuple(example_inputs), {})
    else:
        raise InputError(
            f"example_inputs is a {type(example_inputs).__name__}; give a tensor, a tuple of positional arguments, or "
            "a mapping of keyword arguments"
        )
    parameters = inspect.signature(model.forward).parameters
    # A key-value cache is an object that no tracer takes as an output; without it the numbers are the same.
    if _may_cache(model, parameters) and "use_cache" not in inputs.kwargs:
        inputs.kwargs["use_cache"] = False
    return inputs


def _may_cache(model: nn.Module, parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether the forward takes ``use_cache``: by name, or among keywords that it hands on to a model with a cache."""
    hands_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return "use_cache" in parameters or (hands_on and bool(getattr(text, "use_cache", False)))


def _from_config(model: nn.Module) -> dict[str, Any]:
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", None)
    if config is None or main is None:
        raise InputError(
            f"{type(model).__name__} needs example_inputs: pass the arguments of one forward call (a tensor, a tuple, "
            "or a dict of keyword arguments); only Hugging Face models with a config may go without"
        )
    accepted = inspect.signature(model.forward).parameters
    text, vision = getattr(config, "text_config", config), getattr(config, "vision_config", config)
    device = next(model.parameters()).device
    made: dict[str, Any] = {}
    if "input_ids" in accepted:
        made["input_ids"] = _tokens(getattr(text, "vocab_size", 100), device)
    if "pixel_values" in accepted and hasattr(vision, "image_size"):
        size = vision.image_size if isinstance(vision.image_size, list | tuple) else (vision.image_size,) * 2
        made["pixel_values"] = _noise(2, getattr(vision, "num_channels", 3), *size).to(device)
    if "input_features" in accepted and hasattr(config, "num_mel_bins"):
        made["input_features"] = _noise(2, config.num_mel_bins, 2 * config.max_source_positions).to(device)
    if "decoder_input_ids" in accepted:
        made["decoder_input_ids"] = _tokens(getattr(text, "vocab_size", 100), device)
    if main not in made:
        raise InputError(f"cannot make example inputs for {type(model).__name__} ({main}); pass example_inputs")
    dtype = next(model.parameters()).dtype
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in made.items()}


def _copied(tensor: Tensor) -> Tensor:
    # A leaf of autograd stays one.
    copied = tensor.detach().clone() if tensor.is_leaf else tensor.clone()
    return copied.requires_grad_(tensor.requires_grad) if tensor.is_leaf else copied


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _tokens(vocabulary: int, device: torch.device) -> Tensor:
    low = min(3, vocabulary - 1)
    return (torch.arange(18, device=device).reshape(2, 9) * 7919) % (vocabulary - low) + low


def moved(inputs: Inputs, device: torch.device) -> Inputs:
    """The inputs on another device."""
    return Inputs(*pytree.tree_map_only(Tensor, lambda t: t.to(device), (inputs.args, inputs.kwargs)))


def other_shapes(inputs: Inputs) -> list[Inputs]:
    """The same inputs with another batch and length, and with another batch alone; some models take only the latter."""
    tensors = [t for t in pytree.tree_leaves((inputs.args, inputs.kwargs)) if isinstance(t, Tensor) and t.ndim > 0]
    if not tensors:
        return []
    batch = tensors[0].shape[0]
    lengths = {t.shape[1] for t in tensors if t.ndim > 1 and t.shape[0] == batch and t.shape[1] > 2}

    def vary(tensor: Tensor, length: bool) -> Tensor:
        if tensor.ndim == 0 or tensor.shape[0] != batch:
            return tensor
        index = torch.arange(batch + 1, device=tensor.device) % batch
        longer = tensor.index_select(0, index).clone()
        if length and tensor.ndim > 1 and tensor.shape[1] in lengths:
            longer = longer[:, : tensor.shape[1] - max(1, tensor.shape[1] // 3)].contiguous()
        return longer

    def varied(length: bool) -> Inputs:
        return Inputs(*pytree.tree_map_only(Tensor, lambda t: vary(t, length), (inputs.args, inputs.kwargs)))

    return [varied(length) for length in ((True, False) if lengths else (False,))]
