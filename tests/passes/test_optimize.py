"""The optimising pipeline over exported models of the zoo: the same numbers, and the fusions to expect."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

import attnres_compile as ac
from attnres_compile.capture.inputs import Inputs
from attnres_compile.capture.trace import from_program
from attnres_compile.passes._emit import STAMP
from attnres_compile.passes.base import Pass, run
from attnres_compile.passes.fold_key_norm import FoldKeyNorm
from attnres_compile.passes.fuse_neighbours import FuseNeighbours
from attnres_compile.passes.lower_factored import LowerFactored
from attnres_compile.passes.pipelines import OPTIMIZE
from attnres_compile.passes.remove_dead import RemoveDead
from attnres_compile.passes.schedule_two_phase import ScheduleTwoPhase
from tests import zoo_check
from tests.integration.models import assert_same_gradients
from tests.passes.reads import OPS, Graph, count, outcome
from tests.passes.tracing import subject
from tests.tolerances import assert_close
from tests.zoo import CASES

# RMSNorm as a call and spelled out in three ways, LayerNorm, one or two adds a layer, images, and two stacks.
NAMES = ("nanogpt", "llama", "gemma3", "gpt_neox", "cohere", "opt", "t5", "whisper", "vit", "torch_encoder")
# Cohere spells a LayerNorm out, and OPT folds the tokens between a read and every second norm.
LEFT = ("cohere", "opt")
ONE_SUBLAYER = ("gpt_neox", "cohere")
PLANS: tuple[dict[str, int], ...] = ({"block_size": 1}, {"block_size": 2}, {"block_size": 3}, {"num_blocks": 1})
TWO = PLANS[1]
ALWAYS = ("llama", "gemma3", "gpt_neox", "vit", "t5")
PASSES = (ScheduleTwoPhase(), FuseNeighbours(), RemoveDead(), FoldKeyNorm(), LowerFactored())
Counts = dict[str, int]


def quick(name: str, plan: dict[str, int]) -> bool:
    return name == "nanogpt" or (plan is TWO and name in ALWAYS)


CASES_AND_PLANS = [
    pytest.param(name, plan, marks=() if quick(name, plan) else pytest.mark.slow, id=f"{name}-{plan}")
    for name in NAMES
    for plan in PLANS
]


@cache
def program(name: str) -> ExportedProgram:
    case = CASES[name]
    # In float64 a norm that goes through float32 is left as it is, and no more exact than float32.
    dtype = torch.float64 if case.pure64 else torch.float32
    model = case.build(layers=4 if name in ONE_SUBLAYER else 2).to(dtype)
    return zoo_check.export(case, model, zoo_check.inputs_of(case, model, dtype, (2, 5)), training=False, dynamic=False)


def rewritten(name: str, **plan: Any) -> Graph:
    """The graph of a rewritten program with random queries, and its flat inputs."""
    result: Any = ac.transform(program(name), verify="off", eps=1e-3, **plan)
    values = {key: value.detach().clone() for key, value in result.state_dict.items() if key.startswith("attnres.")}
    zoo_check.randomise(values)
    found = from_program(result, Inputs(*result.example_inputs))
    names = [str(spec.target) for spec in result.graph_signature.input_specs]
    inputs = [values.get(key, value) for key, value in zip(names, found.inputs, strict=True)]
    return fx.GraphModule(found.module, copy.deepcopy(found.module.graph)), inputs


def optimised(found: Graph, *passes: Pass) -> fx.GraphModule:
    module = fx.GraphModule(found[0], copy.deepcopy(found[0].graph))
    run(passes, subject(module))
    return module


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in expected:
        if name.startswith("output"):
            assert_close(actual[name], expected[name], name)
    assert_same_gradients(actual, expected)


def plain(found: Graph) -> fx.GraphModule:
    """Every merge as the read that it is half of."""
    module = fx.GraphModule(found[0], copy.deepcopy(found[0].graph))
    graph: Any = module.graph
    for merge in graph.find_nodes(op="call_function", target=OPS.merge.default):
        o, _, _, partial, _, _, eps, scale = merge.args
        phase = o.args[0].args[0].args[0]
        blocks, queries, key_norms, _ = phase.args
        with graph.inserting_before(phase):
            rows = [graph.call_function(torch.ops.aten.select.int, (m, 0, o.args[1])) for m in (queries, key_norms)]
        for row in rows:
            row.meta["val"] = queries.meta["val"][0]
        with graph.inserting_before(merge):
            sources = [*blocks] if partial is None else [*blocks, partial]
            read = graph.call_function(OPS.depth_attention.default, (sources, *rows, eps, scale))
        read.meta |= merge.meta | {"val": blocks[0].meta["val"]}
        merge.replace_all_uses_with(read)
        graph.erase_node(merge)
    run((RemoveDead(),), subject(module))
    return module


@pytest.mark.parametrize(("name", "plan"), CASES_AND_PLANS)
def test_pipeline(name: str, plan: dict[str, int]) -> None:
    found = rewritten(name, **plan)
    merges, reads = (count(found[0]).get(key, 0) for key in ("merge", "depth_attention"))
    assert merges + reads > 0
    expected = outcome(found)
    module = optimised(found, *OPTIMIZE)
    compare(outcome((module, found[1])), expected)
    text = str(module.graph)
    assert [step(subject(module)) for step in OPTIMIZE] == [False] * len(OPTIMIZE)
    assert str(module.graph) == text

    after = count(module)
    fused = after.get("merge_norm", 0) + after.get("add_merge_norm", 0)
    # every read goes into a norm, and what is scheduled is fused
    unfused = after.get("merge", 0)
    assert fused + unfused + after.get("depth_attention", 0) == merges + reads
    if name in LEFT:
        assert bool(unfused) == bool(merges)
        return
    assert unfused == 0
    assert fused >= merges
    if plan is TWO:
        assert after["add_merge_norm"] > 0


@pytest.mark.parametrize("step", PASSES, ids=lambda step: type(step).__name__)
@pytest.mark.parametrize("name", ["nanogpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_each_pass_alone(name: str, step: Pass) -> None:
    found = rewritten(name, **TWO)
    with torch.no_grad():
        expected = found[0](*found[1])[0]
        module = optimised(found, step)
        assert_close(module(*found[1])[0], expected)
    if isinstance(step, LowerFactored):
        assert count(module) == {}
    marked = {node.meta[STAMP] for node in module.graph.nodes if STAMP in node.meta} - {"rewrite_chains"}
    assert marked == {"FuseNeighbours": {"fuse_neighbours"}, "LowerFactored": {"lower_factored"}}.get(
        type(step).__name__, set()
    )


@pytest.mark.parametrize("plan", PLANS[:3], ids=str)
@pytest.mark.parametrize("name", ["nanogpt", pytest.param("t5", marks=pytest.mark.slow)])
def test_plain_reads_are_scheduled_and_fused(name: str, plan: dict[str, int]) -> None:
    found = rewritten(name, **plan)
    unscheduled = plain(found), found[1]
    assert count(unscheduled[0]).keys() == {"depth_attention"}
    expected = outcome(unscheduled)
    compare(outcome(found), expected)
    module = optimised(unscheduled, *OPTIMIZE)
    compare(outcome((module, found[1])), expected)
    phases = count(found[0])["inter_block"]
    assert count(module)["inter_block"] >= phases > 0
    assert count(module).get("merge", 0) == 0
