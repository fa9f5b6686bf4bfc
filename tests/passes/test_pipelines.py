"""The pipelines as data, and what each makes of a model."""

import pytest
import torch
from torch import Tensor, nn

from attnres_compile.passes.base import run
from attnres_compile.passes.detect_chains import DetectChains
from attnres_compile.passes.inline_regions import InlineRegions
from attnres_compile.passes.pipelines import GRAPH, live
from attnres_compile.passes.plan_blocks import PlanBlocks
from tests.passes import models
from tests.passes.models import WIDTH, Net
from tests.passes.tracing import example, exported, operations, subject, traced


class InRegion(models.Pair):
    """The second add is in a no_grad region, where no pass but the first sees it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        with torch.no_grad():
            return x + self.g(x)


class InAutocast(models.Pair):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = x + self.f(x)
            x = x + self.g(x)
        return x


def test_orders() -> None:
    for outermost in (True, False):
        assert live(outermost=outermost) == (
            InlineRegions(autocast=True),
            DetectChains(live=True, outermost=outermost),
            PlanBlocks(),
        )
    assert (InlineRegions(autocast=False, frozen=False), DetectChains(live=False), PlanBlocks()) == GRAPH


@pytest.mark.parametrize("pipeline", [GRAPH, live(outermost=True), live(outermost=False)])
def test_adds_in_regions(pipeline: tuple[DetectChains, ...]) -> None:
    found = run(pipeline, subject(exported(Net(InRegion(), InRegion())).module))
    (chain,) = found.chains
    assert len(chain.pushes) == 4
    assert chain.plan is not None
    assert chain.plan.reads == 4


def test_autocast_regions_are_read_by_live_models_alone() -> None:
    model = Net(InAutocast(), InAutocast())
    (chain,) = run(live(outermost=True), subject(exported(model).module)).chains
    assert len(chain.pushes) == 4
    found = run(GRAPH, subject(exported(model).module))
    assert not found.chains
    assert "wrap_with_autocast" in operations(found.module)


def test_chain_inside_one_function() -> None:
    model = models.OneFunction()
    module = exported(model, example(2, 5, WIDTH)).module
    (chain,) = run(GRAPH, subject(module)).chains
    assert len(chain.pushes) == 3
    found = run(live(outermost=True), subject(module))
    assert not found.chains
    assert "no module boundary" in found.refusals[0].reason


@pytest.mark.parametrize("pipeline", [GRAPH, live(outermost=True)])
@pytest.mark.parametrize("model", [Net, models.TwoStreams, models.ChannelsFirst])
def test_second_run_changes_nothing(pipeline: tuple[DetectChains, ...], model: type[nn.Module]) -> None:
    found = run(pipeline, subject(traced(model())))
    assert found.chains
    plans = [chain.plan for chain in found.chains]
    text = str(found.module.graph)
    assert [step(found) for step in pipeline] == [False] * len(pipeline)
    assert [chain.plan for chain in found.chains] == plans
    assert str(found.module.graph) == text
