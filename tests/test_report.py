"""The report as text, as plain data and as JSON."""

import json
from dataclasses import replace

import pytest

from attnres_compile import AttnResReport
from attnres_compile.report import ChainReport, Check, RefusalReport

CHAIN = ChainReport(
    index=0,
    rewritten=True,
    source="with an argument of layers.0",
    container="encoder",
    width=768,
    adds=24,
    owners={"Block": 23, "Encoder": 1},
    sublayers=24,
    blocks=(4, 4, 3),
    reads=24,
    parameters=36864,
    where="model.py:12: x = x + self.f(x)",
)
OTHER = replace(CHAIN, index=1, rewritten=False, container="", blocks=(2, 2), parameters=100)
POST = RefusalReport("post-norm: the sum is normalised", "add_1", "model.py:30: return self.norm(x + y)")
REPORT = AttnResReport(
    "Model",
    "torch.export",
    (CHAIN, OTHER),
    (POST, replace(POST, node="add_2", where="model.py:31: z"), RefusalReport("short", "add_9", "source line unknown")),
    (Check("zero queries equal the original", 2.1e-7, 1e-4), Check("rows", 1.0, 0.0)),
)


def test_text() -> None:
    assert str(REPORT).splitlines() == [
        "Model: 2 residual chains (torch.export)",
        "  chain 0: 24 sublayers of width 768 in encoder",
        "    starts    with an argument of layers.0",
        "    adds      24: 23 in Block, 1 in Encoder; first at model.py:12: x = x + self.f(x)",
        "    blocks    3 of 4 and 3 sublayers",
        "    reads     24, 36,864 parameters",
        "  chain 1 (not selected): 24 sublayers of width 768 in the model itself",
        "    starts    with an argument of layers.0",
        "    adds      24: 23 in Block, 1 in Encoder; first at model.py:12: x = x + self.f(x)",
        "    blocks    2 of 2 sublayers",
        "    reads     24, 100 parameters",
        "  refused: post-norm: the sum is normalised (2 times); at model.py:30: return self.norm(x + y)",
        "  refused: short; at source line unknown",
        "  ✓ zero queries equal the original: 2.1e-07 (allowed 1e-04)",
        "  ✗ rows: 1.0e+00 (allowed 0e+00)",
    ]


@pytest.mark.parametrize(("chains", "first"), [((), "0 residual chains"), ((CHAIN,), "1 residual chain ")])
def test_number_of_chains(chains: tuple[ChainReport, ...], first: str) -> None:
    assert str(AttnResReport("M", "symbolic trace", chains, ())).startswith(f"M: {first.strip()} (symbolic trace)")


def test_parameters_are_those_of_rewritten_chains() -> None:
    assert REPORT.parameters == 36864


def test_plain_data() -> None:
    plain = REPORT.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain.keys() == {"model", "front_end", "chains", "refused", "checks", "options", "parameters"}
    assert plain["parameters"] == 36864
    assert plain["chains"][0]["blocks"] == [4, 4, 3]
    assert plain["chains"][0]["owners"] == {"Block": 23, "Encoder": 1}
    assert [chain["rewritten"] for chain in plain["chains"]] == [True, False]
    assert plain["refused"][2] == {"reason": "short", "node": "add_9", "where": "source line unknown"}
    assert plain["checks"][1] == {"name": "rows", "error": 1.0, "tolerance": 0.0, "chains": []}


def test_json() -> None:
    assert json.loads(REPORT.to_json()) == REPORT.to_dict()
    assert "\n  " in REPORT.to_json(indent=2)
    assert "\n" not in REPORT.to_json()


@pytest.mark.parametrize(
    ("error", "tolerance", "passed"),
    [(0.0, 0.0, True), (1e-5, 1e-5, True), (2e-5, 1e-5, False), (float("inf"), 1.0, False), (float("nan"), 1.0, False)],
)
def test_checks(error: float, tolerance: float, passed: bool) -> None:
    assert Check("a check", error, tolerance).passed == passed


def test_an_infinite_error_is_valid_json() -> None:
    """Infinity is no JSON; other programs read the file."""
    text = replace(REPORT, checks=(Check("lost", float("inf"), 0.0),)).to_json()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
