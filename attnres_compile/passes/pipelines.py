"""The pipelines: which passes run, in which order, and why there."""

from __future__ import annotations

from attnres_compile.passes.base import Pass
from attnres_compile.passes.detect_chains import DetectChains
from attnres_compile.passes.fold_key_norm import FoldKeyNorm
from attnres_compile.passes.fuse_neighbours import FuseNeighbours
from attnres_compile.passes.inline_regions import InlineRegions
from attnres_compile.passes.plan_blocks import PlanBlocks
from attnres_compile.passes.remove_dead import RemoveDead
from attnres_compile.passes.schedule_two_phase import ScheduleTwoPhase


def live(*, outermost: bool) -> tuple[Pass, ...]:
    """The analysis of a live module's graph, which is only read."""
    return (
        # First, because a residual add inside a nested graph is seen by no other pass. The graph does not run, so
        # autocast regions may lose their dtype.
        InlineRegions(autocast=True),
        DetectChains(live=True, outermost=outermost),
        PlanBlocks(),
    )


GRAPH: tuple[Pass, ...] = (
    # The graph will run: an autocast region stays, and is a reader like any other operation; so does one without
    # gradient that no stream passes through, whose parameters would be trained otherwise.
    InlineRegions(autocast=False, frozen=False),
    DetectChains(),
    PlanBlocks(),
)

OPTIMIZE: tuple[Pass, ...] = (
    # Before the fusion, which knows merges only.
    ScheduleTwoPhase(),
    FuseNeighbours(),
    # After the fusion, so that what it leaves behind goes too; before the fold, which would fold dead reads.
    RemoveDead(),
    FoldKeyNorm(),
    # The fold leaves the selected rows.
    RemoveDead(),
)
