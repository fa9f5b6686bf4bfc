"""The report of a transformation: chains, blocks, reads; what was skipped, why, and where."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class ChainReport:
    """One residual chain.

    Attributes:
        index: in the report; ``chains=`` selects by it.
        rewritten: whether it was selected.
        source: where ``b_0`` comes from.
        container: path of the module that holds the chain.
        width: features.
        adds: residual adds.
        owners: adds per class of the module that makes them.
        sublayers: states after the source that are read.
        blocks: block sizes in sublayers.
        reads: reads of more than one source.
        parameters: parameters added.
        where: source location of the first add.
        names: per sublayer the path of the module that makes its output.
    """

    index: int
    rewritten: bool
    source: str
    container: str
    width: int
    adds: int
    owners: dict[str, int]
    sublayers: int
    blocks: tuple[int, ...]
    reads: int
    parameters: int
    where: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class RefusalReport:
    """A candidate that is no chain: why, and where in the user's source."""

    reason: str
    node: str
    where: str


@dataclass(frozen=True)
class Check:
    """One check of a transformed model: the error that was measured, what is allowed, and which chains failed it."""

    name: str
    error: float
    tolerance: float
    chains: tuple[int, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the error is small enough."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class AttnResReport:
    """What a transformation did, or a dry run would do.

    Attributes:
        model: its class.
        front_end: what traced it.
        chains: every residual chain, also those that were not selected.
        refused: what looked like a chain and is none.
        checks: of the transformed model; none in a dry run.
        options: the fields of ``AttnResConfig``, with the indices of the rewritten chains where some were selected.
    """

    model: str
    front_end: str
    chains: tuple[ChainReport, ...]
    refused: tuple[RefusalReport, ...]
    checks: tuple[Check, ...] = field(default=())
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Parameters added in all."""
        return sum(chain.parameters for chain in self.chains if chain.rewritten)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        plain: dict[str, Any] = json.loads(self.to_json())
        return plain

    def to_json(self, indent: int | None = None) -> str:
        """The same as JSON."""
        plain = {**asdict(self), "parameters": self.parameters}
        for check in plain["checks"]:
            # JSON has no infinity.
            check["error"] = check["error"] if math.isfinite(check["error"]) else str(check["error"])
        return json.dumps(plain, indent=indent)

    def __str__(self) -> str:
        lines = [f"{self.model}: {len(self.chains)} residual chain{'s' * (len(self.chains) != 1)} ({self.front_end})"]
        for chain in self.chains:
            owners = ", ".join(f"{count} in {name}" for name, count in chain.owners.items())
            lines += [
                f"  chain {chain.index}{'' if chain.rewritten else ' (not selected)'}: {chain.sublayers} sublayers of "
                f"width {chain.width} in {chain.container or 'the model itself'}",
                f"    starts    {chain.source}",
                f"    adds      {chain.adds}: {owners}; first at {chain.where}",
                f"    blocks    {len(chain.blocks)} of {_sizes(chain.blocks)} sublayers",
                f"    reads     {chain.reads}, {chain.parameters:,} parameters",
            ]
        for reason, group in _grouped(self.refused).items():
            times = f" ({len(group)} times)" if len(group) > 1 else ""
            lines.append(f"  refused: {reason}{times}; at {group[0].where}")
        lines += [
            f"  {'✓' if check.passed else '✗'} {check.name}: {check.error:.1e} (allowed {check.tolerance:.0e})"
            for check in self.checks
        ]
        return "\n".join(lines)


def _sizes(blocks: tuple[int, ...]) -> str:
    sizes = list(dict.fromkeys(blocks))
    return " and ".join(str(size) for size in sizes)


def _grouped(refused: tuple[RefusalReport, ...]) -> dict[str, list[RefusalReport]]:
    groups: dict[str, list[RefusalReport]] = {}
    for refusal in refused:
        groups.setdefault(refusal.reason, []).append(refusal)
    return groups
