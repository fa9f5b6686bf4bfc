"""What a checkpointed region hands on as a view is kept, and nothing else."""

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from attnres_compile.passes.base import run
from attnres_compile.passes.keep_boundaries import KeepBoundaries
from tests.passes.tracing import example, subject

RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE


def joint(regions: dict[str, int]) -> fx.GraphModule:
    def function(x: Tensor) -> Tensor:
        return torch.ops.aten.view.default(x.mm(x), [1, 3, 3]).sin()

    module = make_fx(function, tracing_mode="fake")(example(3, 3))
    for node in module.graph.nodes:
        if node.name in regions:
            node.meta |= {"recompute": RECOMPUTE, "ac_graph_id": regions[node.name]}
    return module


def policies(module: fx.GraphModule) -> dict[str, CheckpointPolicy]:
    return {node.name: node.meta["recompute"] for node in module.graph.nodes if "recompute" in node.meta}


def test_what_a_view_shows_is_kept() -> None:
    module = joint({"mm": 1, "view": 1, "sin": 2})
    run((KeepBoundaries(),), subject(module))
    assert policies(module) == {"mm": CheckpointPolicy.MUST_SAVE, "view": RECOMPUTE, "sin": RECOMPUTE}
    assert not KeepBoundaries()(subject(module))


@pytest.mark.parametrize(
    "regions",
    [{}, {"mm": 1, "view": 1, "sin": 1}, {"mm": 1, "view": 1}, {"view": 1, "sin": 2}],
    ids=["none", "one", "last", "outside"],
)
def test_all_else_is_left(regions: dict[str, int]) -> None:
    module = joint(regions)
    assert not KeepBoundaries()(subject(module))
    assert policies(module) == dict.fromkeys(regions, RECOMPUTE)
