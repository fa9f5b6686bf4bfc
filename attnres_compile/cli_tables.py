"""A report as tables for the terminal."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from attnres_compile.report import AttnResReport, Check


def tables(report: AttnResReport) -> Iterator[Table]:
    """Chains, where they are, refusals and checks, as far as there are any."""
    if report.chains:
        yield _chains(report)
        yield _places(report)
    if report.refused:
        yield _refused(report)
    if report.checks:
        yield _checks(report.checks)


def _chains(report: AttnResReport) -> Table:
    table = Table("chain", "container", "adds", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("width", "sublayers", "blocks", "reads", "parameters"):
        table.add_column(name, justify="right")
    for chain in report.chains:
        runs = [f"{len(list(group))} × {size}" for size, group in groupby(chain.blocks)]
        table.add_row(
            f"{chain.index}" if chain.rewritten else f"{chain.index} (not selected)",
            Text(chain.container or "the model itself"),
            Text(", ".join(f"{count} in {owner}" for owner, count in chain.owners.items())),
            f"{chain.width}",
            f"{chain.sublayers}",
            " + ".join(runs),
            f"{chain.reads}",
            f"{chain.parameters:,}",
        )
    return table


def _places(report: AttnResReport) -> Table:
    table = Table("chain", "source", "first add", box=SIMPLE_HEAD, pad_edge=False)
    for chain in report.chains:
        table.add_row(f"{chain.index}", Text(f"starts {chain.source}"), Text(_short(chain.where)))
    return table


def _refused(report: AttnResReport) -> Table:
    table = Table("refused because", "times", "first at", box=SIMPLE_HEAD, pad_edge=False)
    first = {refusal.reason: refusal.where for refusal in reversed(report.refused)}
    for reason, times in Counter(refusal.reason for refusal in report.refused).items():
        table.add_row(Text(reason), f"{times}", Text(_short(first[reason])))
    return table


def _checks(checks: Sequence[Check]) -> Table:
    table = Table("", "check", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("error", "allowed"):
        table.add_column(name, justify="right")
    for check in checks:
        mark = Text("✓", "green") if check.passed else Text("✗", "red")
        table.add_row(mark, Text(check.name), f"{check.error:.1e}", f"{check.tolerance:.0e}")
    return table


def _short(where: str) -> str:
    """A source location without the part of the path that says nothing: that of the installation, or of this folder."""
    installed = where.rpartition("site-packages/")[2]
    return installed.removeprefix(f"{os.getcwd()}/")
