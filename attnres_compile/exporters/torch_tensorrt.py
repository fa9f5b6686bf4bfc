"""Let torch_tensorrt put the reads of a model into its engines, as this package's plugins.

Without this, torch_tensorrt leaves the operators to PyTorch and cuts its engine at every read.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from torch import fx

from attnres_compile.config import AttnResConfig
from attnres_compile.errors import MissingDependencyError
from attnres_compile.exporters.node_types import DOMAIN
from attnres_compile.exporters.tensorrt_plugins import register_plugins
from attnres_compile.passes.base import Subject, run
from attnres_compile.passes.join_phases import JoinPhases
from attnres_compile.passes.remove_dead import RemoveDead

_READ = torch.ops.attnres_compile.depth_attention.default


def register_converters() -> None:
    """Register what ``torch_tensorrt.compile(..., ir="dynamo")`` needs to convert a transformed model's reads.

    A lowering pass turns both phases back into plain reads (``passes/join_phases.py``), and a converter makes a plugin
    ``DepthAttentionN<n>`` of each, with any shapes but the features' number dynamic. Plugins are registered with
    TensorRT as they are needed. Calling it again changes nothing.

    Raises:
        MissingDependencyError: ``torch_tensorrt``, or what the plugins need, cannot be imported.
    """
    registry = _module("torch_tensorrt.dynamo.conversion._ConverterRegistry")
    lowering = _module("torch_tensorrt.dynamo.lowering.passes._aten_lowering_pass")
    register_plugins(())
    if _READ in registry.DYNAMO_CONVERTERS:
        return
    registry.dynamo_tensorrt_converter(_READ, supports_dynamic_shapes=True)(_convert)
    # Before decompositions, which take the first phase's results apart.
    lowering.ATEN_PRE_LOWERING_PASSES.add_pass_with_index(_join_phases)


def _join_phases(module: fx.GraphModule, settings: Any) -> fx.GraphModule:
    return run((JoinPhases(), RemoveDead()), Subject(module, AttnResConfig())).module


def _convert(ctx: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    sources, query, key_norm, eps, scale = args
    if key_norm is None:
        key_norm = np.ones(query.shape[-1:], dtype=np.float32)
    register_plugins([node := f"DepthAttentionN{len(sources)}"])
    tensor = _module("torch_tensorrt.dynamo.conversion.converter_utils").get_trt_tensor
    inputs = [tensor(ctx, value, f"{name}_{i}") for i, value in enumerate((query, key_norm, *sources))]
    plugin = getattr(getattr(_module("tensorrt.plugin").op, DOMAIN), node)
    layer = ctx.net.add_plugin(plugin(*inputs, eps=float(eps), scale=float(scale)), aot=True)
    layer.name = f"[{target}]-[{name}]"
    return layer.get_output(0)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # it raises others than ImportError without its libraries or a GPU
        package = name.partition(".")[0]
        raise MissingDependencyError(
            f"the converters need {package}, whose {name} cannot be imported ({error}): pip install {package}"
        ) from error
