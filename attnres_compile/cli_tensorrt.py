"""``attnres export --format tensorrt``: ranges of axes as text, and the table of what became of the reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from attnres_compile.errors import OptionError
from attnres_compile.exporters.example_call import dynamic_shapes_of, example_call, is_axes
from attnres_compile.exporters.tensorrt import export_tensorrt

Range = tuple[int, int, int]


def export(
    model: nn.Module,
    inputs: Any,
    path: Path,
    targets: str | None,
    axes: Mapping[str, str | None],
    *,
    echo: Callable[[str], None],
    **options: Any,
) -> None:
    """Build an engine, and say what became of its reads.

    Args:
        model: the transformed model.
        inputs: its example inputs.
        path: the engine.
        targets: compute capabilities, as ``80,86``; None for the exporter's choice.
        axes: ``smallest:usual:largest`` of the axes ``batch`` (the first of all tensors) and ``sequence`` (the second
            of integer tensors); None leaves one static.
        echo: takes the lines.
        **options: further options of ``export_tensorrt``.
    """
    try:
        capabilities = None if targets is None else tuple(int(target) for target in targets.split(","))
    except ValueError as error:
        raise OptionError(f"--compute-capabilities takes numbers, as 80,86; got {targets!r}") from error
    ranges = {name: _range(name, text) for name, text in axes.items() if text is not None}
    result = export_tensorrt(
        model,
        inputs,
        path,
        compute_capabilities=capabilities,
        dynamic_shapes=_shapes(model, inputs, ranges),
        echo=echo,
        **options,
    )
    for read in result.reads:
        echo(
            f"  {read.node}: {read.sources} sources, mixed in {len(read.mixing)} kernel{'s' * (len(read.mixing) != 1)}"
        )
    echo("The engine was built, not run: run it on one of its GPUs, as examples/tensorrt_gpu_check.py does.")


def _range(axis: str, text: str) -> Range:
    try:
        smallest, usual, largest = map(int, text.split(":"))
    except ValueError as error:
        raise OptionError(f"the {axis} axis takes smallest:usual:largest, as 1:2:8; got {text!r}") from error
    return smallest, usual, largest


def _shapes(model: nn.Module, inputs: Any, ranges: Mapping[str, Range]) -> dict[str, Any]:
    """The axes that the ONNX export makes dynamic by itself, as far as they have a range here."""

    def axes(spec: Any) -> Any:
        if not isinstance(spec, Mapping):
            return spec
        return {axis: ranges[name] for axis, name in spec.items() if name in ranges} or None

    return {
        name: pytree.tree_map(axes, value, is_leaf=is_axes)
        for name, value in dynamic_shapes_of(example_call(model, inputs), None).items()
    }
