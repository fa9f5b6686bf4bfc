"""The pipelines: which passes run, in which order, and why there."""

from __future__ import annotations

from attnres_compile.passes.base import Pass
from attnres_compile.passes.detect_chains import DetectChains
from attnres_compile.passes.inline_regions import InlineRegions
from attnres_compile.passes.plan_blocks import PlanBlocks

LIVE: tuple[Pass, ...] = (
    # First, because a residual add inside a nested graph is seen by no other pass. The graph is only read, so
    # autocast regions may lose their dtype.
    InlineRegions(autocast=True),
    DetectChains(live=True),
    PlanBlocks(),
)

GRAPH: tuple[Pass, ...] = (
    # The graph will run: an autocast region stays, and is a reader like any other operation.
    InlineRegions(autocast=False),
    DetectChains(),
    PlanBlocks(),
)
