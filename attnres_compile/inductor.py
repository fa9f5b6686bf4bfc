"""Inductor behind the passes: the lowering runs inside it, after autograd, and is part of its cache key."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._inductor
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table

from attnres_compile.config import AttnResConfig
from attnres_compile.passes.accumulate_gradients import AccumulateGradients
from attnres_compile.passes.base import Pass, Subject, run
from attnres_compile.passes.join_products import JoinProducts
from attnres_compile.passes.keep_states import KeepStates
from attnres_compile.passes.lower_factored import LowerFactored
from attnres_compile.passes.sink_gradients import SinkGradients

JOINT, POST_GRAD = "joint_custom_pre_pass", "post_grad_custom_pre_pass"
# In inference, up to so many tokens generated code is faster than calls of kernels (measured with 1 and with 512).
FEW_TOKENS = 1024


class InInductor(CustomGraphPass):
    """A pipeline as Inductor calls it, after the passes that the user had in the same place."""

    def __init__(self, pipeline: tuple[Pass, ...], before: Any) -> None:
        """Run ``pipeline`` after what is in the slot: a pass, several, or None."""
        self.pipeline = pipeline
        self.before = tuple(before) if isinstance(before, list | tuple) else () if before is None else (before,)

    def __call__(self, graph: fx.Graph) -> None:
        """Run over one graph: a forward's, or a backward's."""
        for before in self.before:
            before(graph)
        module = graph.owning_module
        assert module is not None
        run(self.pipeline, Subject(module, AttnResConfig()))

    def uuid(self) -> Any:
        """Changes with every source file of this package: its gradients and kernels are in no graph."""
        before = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.before]
        return None if None in before else (_digest(), repr(self.pipeline), *before)


def compile_module(
    module: fx.GraphModule, inputs: Any, *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Any:
    """``torch.compile``'s own ``mode`` and ``options`` for Inductor, with the lowering added."""
    patches = dict(torch._inductor.list_mode_options(mode)) if mode not in (None, "default") else {}
    patches |= {key.replace("-", "_"): value for key, value in (options or {}).items()}
    # A gradient is many operations: generated code for it takes long to compile and keeps more than the kernels do.
    trains = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
    lowering = LowerFactored(0 if trains else FEW_TOKENS, select_decomp_table())
    slots: dict[str, tuple[Pass, ...]] = {
        # Before the partitioner, which goes by the tags.
        JOINT: (KeepStates(),),
        # The lowering first, which makes the products and may add sums of its own.
        POST_GRAD: (lowering, JoinProducts(), AccumulateGradients(), SinkGradients()),
    }
    for slot, pipeline in slots.items():
        patches[slot] = InInductor(pipeline, patches.get(slot, getattr(inductor_config, slot)))
    return compile_fx(module, inputs, config_patches=patches)


@cache
def _digest() -> bytes:
    package = Path(__file__).parent
    return get_hash_for_files(tuple(sorted(str(path) for path in package.rglob("*.py"))))
