"""The zoo through both routes: exact at zero queries, equal to each other at random ones, refused with a reason."""

import pytest
import torch
from torch import nn

import attnres_compile as ac
from attnres_compile import graphs
from attnres_compile.config import AttnResConfig
from attnres_compile.verification import call, relative_error
from tests import zoo_check
from tests.tolerances import TOLERANCE
from tests.zoo import CASES, Case

TRANSFORMED = [case for case in CASES.values() if not case.refused]
REFUSED = [case for case in CASES.values() if case.refused]


# One of each kind of stream; the others take a quarter of an hour and run with `make test-all`.
ALWAYS = {"llama", "nanogpt", "opt", "mamba2", "modernbert", "torch_encoder", "t5"}


def named(cases: list[Case]) -> pytest.MarkDecorator:
    marked = [pytest.param(c, marks=[] if c.name in ALWAYS or c.refused else pytest.mark.slow) for c in cases]
    return pytest.mark.parametrize("case", marked, ids=[case.name for case in cases])


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@named(TRANSFORMED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_zero_queries_reproduce_the_model(case: Case, dtype: torch.dtype) -> None:
    measured = zoo_check.measure(case, dtype)
    # A model that norms in fp32 inside turns a difference of 1e-16 into one of 1e-7 when a rounding flips.
    allowed = TOLERANCE[dtype if case.pure64 else torch.float32]
    assert len(measured.errors) == 8
    assert {what: error for what, error in measured.errors.items() if not error <= allowed} == {}
    assert measured.adds == case.adds
    assert measured.pushes == case.adds
    assert measured.sublayers == case.sublayers


@named(TRANSFORMED)
def test_routes_agree(case: Case) -> None:
    model = case.build()
    inputs, other = (zoo_check.inputs_of(case, model, torch.float32, shape) for shape in zoo_check.shapes(case))
    live = ac.transform(model, (inputs.kwargs), num_blocks=3, verify="off")
    program = zoo_check.export(case, model, inputs, training=False)
    rewritten = graphs.rewrite_program(*graphs.analyse_program(program, AttnResConfig(num_blocks=3)))
    exported = zoo_check.export(case, live, inputs, training=False)
    # The same operations on the same operands, node for node.
    assert zoo_check.structure(exported.graph) == zoo_check.structure(rewritten.graph)

    graph: nn.Module = rewritten.module()
    for transformed in (live, graph):
        zoo_check.randomise(zoo_check.reads_of(transformed))
    with torch.no_grad():
        plain = call(model.eval(), inputs)
        for shape in (inputs, other):
            assert relative_error(call(graph, shape), call(live.eval(), shape)) <= TOLERANCE[torch.float32]
        assert relative_error(call(live, inputs), plain) > TOLERANCE[torch.float32]


@named(REFUSED)
def test_refused_with_a_reason_and_a_place(case: Case) -> None:
    model = case.build()
    reason = "activation after the add" if case.name == "resnet" else "post-norm"
    with pytest.raises(ac.RefusedError, match=reason) as caught:
        ac.transform(model, case.inputs(2, 8))
    assert "modeling_" in str(caught.value) or "own_models.py" in str(caught.value)
    assert not hasattr(model, "attnres")
    report = ac.inspect(model, case.inputs(2, 8))
    assert report.chains == ()
    assert all(reason in refusal.reason for refusal in report.refused)
