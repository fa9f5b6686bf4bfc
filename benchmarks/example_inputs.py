"""Example inputs for transformers' architectures, by the names of their forward's arguments.

Nothing here knows an architecture. Where a name stands for tensors of several forms (audio in waves or spectrograms,
images in frames or patches) there is a variant for each, and the first that the model takes is used.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attnres_compile.capture.copies import shared_copy
from attnres_compile.capture.inputs import Inputs, normalise
from attnres_compile.verification import call

BATCH, LENGTH, GRID, FRAMES, VARIANTS = 2, 9, 4, 32, 3
OPTIONAL = {"decoder_input_ids", "bbox", "spatial_shapes", "pixel_attention_mask"}


def example(model: nn.Module) -> Inputs:
    """One call that the model takes: what its config says, or else by the names of its arguments.

    Raises:
        ValueError: there is none; with what was said to each try.
    """
    problems: dict[str, None] = {}
    for make in _ways(model):
        try:
            inputs = make()
            with torch.no_grad():
                call(shared_copy(model), inputs)
            return inputs
        except Exception as error:
            problems[f"{type(error).__name__}: {error}"] = None
    raise ValueError(" | ".join(problems))


def _ways(model: nn.Module) -> Iterator[Callable[[], Inputs]]:
    yield lambda: normalise(model, None)
    for variant in range(VARIANTS):
        yield lambda variant=variant: normalise(model, _Maker(model, variant).needed())  # type: ignore[misc]
    if "input_ids" in inspect.signature(model.forward).parameters:
        yield lambda: normalise(model, {"input_ids": _Maker(model, 0).tokens()})


class _Maker:
    """Tensors for the names that a forward takes without a default, and for its main input."""

    def __init__(self, model: nn.Module, variant: int) -> None:
        self.model, self.variant = model, variant
        self.parameters = inspect.signature(model.forward).parameters
        self.config: Any = model.config

    def needed(self) -> dict[str, Tensor]:
        """One tensor a name."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = [n for n, p in self.parameters.items() if p.default is p.empty and p.kind in kinds]
        names += [n for n in (str(self.model.main_input_name), *OPTIONAL) if n in self.parameters and n not in names]
        if self.variant and "input_features_mask" in self.parameters.keys() - set(names):
            names.append("input_features_mask")
        return {name: self.made(name, names) for name in names}

    def made(self, name: str, names: list[str]) -> Tensor:
        """The tensor for a name."""
        if name.endswith("input_ids"):
            return self.tokens()
        if name.endswith("grid_thw"):
            return torch.tensor([[1, GRID, GRID]])
        if name in ("pixel_values", "images", "pixel_values_videos", "hidden_states"):
            if any(other.endswith("grid_thw") for other in names):
                return torch.randn(GRID * GRID, self.patch() * self.size(("temporal_patch_size",), 1))
            if "spatial_shapes" in names:
                return torch.randn(BATCH, GRID * GRID, self.patch())
            if name == "hidden_states":
                return torch.randn(BATCH, LENGTH, self.size(("hidden_size", "d_model"), 32))
            return self.images(frames=(self.variant == 1) != (name == "pixel_values_videos"))
        makers: dict[str, Callable[[], Tensor]] = {
            "input_features": self.spectrogram,
            "input_values": self.wave,
            "input_audio": self.wave,
            "waveform": self.wave,
            "past_values": self.series,
            "input_features_mask": lambda: torch.ones(BATCH, self.frames(), dtype=torch.long),
            "bbox": lambda: torch.zeros(BATCH, LENGTH, 4, dtype=torch.long),
            "inputs_embeds": lambda: torch.randn(BATCH, LENGTH, self.size(("hidden_size", "d_model"), 32)),
            "query_embeds": lambda: torch.randn(BATCH, LENGTH, self.size(("hidden_size",), 32)),
            "spatial_shapes": lambda: torch.full((BATCH, 2), GRID),
            "pixel_attention_mask": lambda: torch.ones(BATCH, GRID * GRID, dtype=torch.long),
        }
        if name not in makers:
            raise ValueError(f"no example for {name!r}")
        return makers[name]()

    def tokens(self) -> Tensor:
        vocabulary = 100
        with contextlib.suppress(ValueError):  # there are several texts
            vocabulary = getattr(self.config.get_text_config(), "vocab_size", None) or vocabulary
        return torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) * 7 % (vocabulary - 4) + 4

    def images(self, frames: bool) -> Tensor:
        found = _find(self.config, ("image_size", "crop_size", "img_size")) or (32, 32, 256)[self.variant]
        height, width = found if isinstance(found, list | tuple) else (found,) * 2
        shape = (self.size(("num_frames",), 2),) if frames else ()
        return torch.randn(BATCH, *shape, self.size(("num_channels", "in_channels"), 3), height, width)

    def spectrogram(self) -> Tensor:
        mels = self.size(("num_mel_bins", "feature_size", "n_mels", "num_mels"), 80)
        return torch.randn(*((BATCH, mels, self.frames()) if self.variant else (BATCH, self.frames(), mels)))

    def frames(self) -> int:
        return 2 * self.size(("max_source_positions",), FRAMES // 2) if self.variant == 1 else FRAMES

    def wave(self) -> Tensor:
        mels, frames = _find(self.config, ("num_mel_bins",)), _find(self.config, ("max_length",))
        if self.variant == 2 and isinstance(mels, int) and isinstance(frames, int):
            return torch.randn(BATCH, frames, mels)
        return torch.randn(*((BATCH, 1, 3200) if self.variant else (BATCH, 3200)))

    def series(self) -> Tensor:
        length = self.size(("context_length",), 32)
        return torch.randn(
            *((BATCH, length) if self.variant else (BATCH, length, self.size(("num_input_channels",), 1)))
        )

    def patch(self) -> int:
        """Numbers in a patch of an image."""
        size = _find(self.config, ("patch_size",))
        height, width = size if isinstance(size, list | tuple) else (size or 8,) * 2
        return height * width * self.size(("num_channels", "in_channels", "in_chans"), 3)

    def size(self, names: tuple[str, ...], otherwise: int) -> int:
        found = _find(self.config, names)
        return found if isinstance(found, int) else otherwise


def _find(config: Any, names: tuple[str, ...]) -> Any:
    """The first attribute of these names that says something, in a config or in its parts."""
    for name in names:
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return next((found for part in parts if part is not None and (found := _find(part, names)) is not None), None)
