"""Random residual programs: equal at zero and at random queries, or refused.

``benchmarks/hostile.py`` runs thousands.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.hostile import check
from tests.hostile.found import FOUND
from tests.hostile.programs import Program, programs

quiet: dict[str, Any] = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}


@seed(2603)
@settings(max_examples=150, **quiet)
@given(programs())
def test_graphs(program: Program) -> None:
    check.outcome(program, "graph")


@seed(15031)
@settings(max_examples=90, **quiet)
@given(programs())
def test_live_models(program: Program) -> None:
    check.outcome(program, "live")


@seed(1)
@settings(max_examples=10, **quiet)
@given(programs())
def test_live_models_through_export(program: Program) -> None:
    check.outcome(program, "export")


@pytest.mark.parametrize("name", FOUND)
def test_found_before(name: str) -> None:
    """Each was wrong, or refused by verification alone, once."""
    program, routes = FOUND[name]
    for route, expected in routes.items():
        assert check.outcome(program, route).startswith(expected)
