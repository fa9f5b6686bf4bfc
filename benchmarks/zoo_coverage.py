"""Which share of the pre-norm architectures is transformed with every residual add covered.

An architecture counts as *pre-norm* when a route found a residual stream in it, or turned a sum down for a reason that
is not one of ``RIGHT``; so does one that was not traced, that failed, or that verification refused. It is *covered* by
a route when the result is exact, every chain that the other route found is there with as many adds, and whatever sum
is in no chain was left for a reason of ``RIGHT``.
"""

from __future__ import annotations

import re
from typing import Any

Row = dict[str, Any]
# Sums that are no steps of a residual stream: what the refusal says first.
RIGHT = {
    "post-norm": "the sum is normalised, and the stream goes on from there",
    "activation after the add": "the sum passes an activation, and the stream goes on from there",
    "the skip is multiplied by a tensor": "the skip has a gate, or a weight per feature",
    "no residual add": "skips are missing, concatenated, or mixed by matrices",
    "the stream ends after one sublayer": "no other add goes on from the sum",
    "nothing would learn from": "the outputs hang on it by integers or under `torch.no_grad` alone",
}
ROUTES = ("live", "graph")
UNTRACED = ("not traced", "not exported")
DEFINITION = """Of {count} pre-norm architectures {live} are covered as live modules and {either} by a route at least.

*Pre-norm* is each in which a route found a residual stream, or turned a sum down for another reason than the right
ones, and each that was not traced, failed, or took too long. *Covered* means exact, with as many adds as the other
route found, and every sum outside of the chains turned down for a right reason: {kinds}.
In covered models there were sums of these kinds: {left}.

{exceptions}
"""


def coverage(rows: list[Row]) -> str:
    """The share as a sentence, what was left of models that are covered, and the exceptions with their reasons."""
    found = [row for row in rows if is_pre_norm(row)]
    live = [row for row in found if covers(row, "live")]
    either = [row for row in found if any(covers(row, route) for route in ROUTES)]
    exceptions = [f"- {row['name']}: {why_not(row)}" for row in found if row not in live]
    left = sorted({reason for row in live for reason in map(kind, uncovered(row, "live")) if reason in RIGHT})
    kinds = "; ".join(f"*{reason}* ({meaning})" for reason, meaning in RIGHT.items())
    return DEFINITION.format(
        count=len(found),
        live=f"{len(live)} ({share(live, found)})",
        either=f"{len(either)} ({share(either, found)})",
        kinds=kinds,
        left=", ".join(left) or "none",
        exceptions="Exceptions:\n\n" + "\n".join(exceptions) if exceptions else "There is no exception.",
    )


def share(part: list[Row], whole: list[Row]) -> str:
    """In per cent."""
    return f"{100 * len(part) / max(len(whole), 1):.1f} %"


def is_pre_norm(row: Row) -> bool:
    """Whether there is a residual stream in it, as far as can be told."""
    if "live" not in row:
        return row["status"] in ("time limit", "failed")
    if any(row[route].get("adds") for route in ROUTES):
        return True
    traced = [route for route in ROUTES if row[route]["status"] not in UNTRACED] or ROUTES
    return any(kind(reason) not in RIGHT for route in traced for reason in uncovered(row, route))


def covers(row: Row, route: str) -> bool:
    """Whether a route transforms it exactly, with every add."""
    if route not in row or row[route]["status"] != "exact":
        return False
    found = {each: sum(row[each].get("adds", [])) + row[each].get("left_out", 0) for each in ROUTES}
    return found[route] == max(found.values()) and all(kind(reason) in RIGHT for reason in uncovered(row, route))


def uncovered(row: Row, route: str) -> list[str]:
    """Why sums are in no chain; of a model that was not transformed, what its refusal or its error says."""
    outcome = row.get(route, row)
    if "uncovered" in outcome:
        return list(outcome["uncovered"])
    lines = [line.strip() for line in outcome["reason"].splitlines() if line.strip()]
    refusals = [line.removeprefix("refused: ") for line in lines if line.startswith("refused: ")]
    return refusals if outcome["status"] == "refused" and refusals else lines[:1]


def kind(reason: str) -> str:
    """The right reason that it is, or itself."""
    return next((right for right in RIGHT if reason.startswith(right)), reason)


def why_not(row: Row) -> str:
    """What the routes say of one that is not covered live."""
    if "live" not in row:
        return str(row["reason"])
    said = []
    for route in ROUTES:
        wrong = [reason for reason in uncovered(row, route) if kind(reason) not in RIGHT]
        if covers(row, route):
            said.append(f"{route}: covered")
        elif row[route]["status"] == "exact":
            said.append(f"{route}: {row[route]['adds']} adds; {'; '.join(dict.fromkeys(wrong)) or 'fewer adds'}")
        else:
            said.append(f"{route}: {row[route]['status']}: {'; '.join(dict.fromkeys(wrong))}")
    return re.sub(r"/\S*/site-packages/", "", " / ".join(said))[:400]
