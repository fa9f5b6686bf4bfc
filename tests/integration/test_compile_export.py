"""torch.compile and torch.export on top of a transformed model."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch.export import export

from tests.integration.models import (
    QUERY,
    CountOps,
    assert_same_gradients,
    attnres_parameters,
    example,
    gradients,
    pair,
    run,
    transformed,
    without_dropout,
)
from tests.tolerances import assert_close, relative_error
from tests.zoo import CASES

# Dynamo asks each tensor that enters a compiled frame for its gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

NAMES = ("llama", "gpt2", "nanogpt")
every_name = pytest.mark.parametrize("name", NAMES)
SHAPES = ((2, 7), (3, 11))


class Graphs:
    """A backend that runs Dynamo's graphs as they are and keeps them."""

    def __init__(self) -> None:
        self.found: list[fx.GraphModule] = []

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        self.found.append(module)
        return module.forward


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def targets(module: fx.GraphModule) -> Counter[str]:
    """How often each of the library's operators is called."""
    names = (str(node.target) for node in module.graph.nodes if node.op == "call_function")
    return Counter(name.split(".")[1] for name in names if name.startswith("attnres_compile."))


def compiled_inputs(name: str, batch: int, length: int) -> dict[str, Any]:
    inputs: dict[str, Any] = example(name, batch, length)
    return inputs if name == "nanogpt" else inputs | {"use_cache": False}


@every_name
def test_one_graph_for_every_shape(name: str) -> None:
    model, backend = transformed(name), Graphs()
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    with CountOps() as eager, torch.no_grad():
        run(name, model)
    for shape in SHAPES:
        inputs = compiled_inputs(name, *shape)
        with torch.no_grad():
            assert_close(CASES[name].output(compiled(**inputs)), run(name, model, inputs))
    assert len(backend.found) == 1
    assert dict(targets(backend.found[0])) == eager.counts
    assert eager.reads == 6


@every_name
def test_compiled_follows_the_queries(name: str) -> None:
    """The parameters are inputs of the graph, not constants in it."""
    model, backend = transformed(name), Graphs()
    compiled: Any = torch.compile(model, fullgraph=True, backend=backend)
    inputs = compiled_inputs(name, 2, 7)
    with torch.no_grad():
        before = CASES[name].output(compiled(**inputs))
        model.get_parameter(QUERY).neg_()
        after = CASES[name].output(compiled(**inputs))
        assert_close(after, run(name, model, inputs))
    assert relative_error(after, before) > 1e-3
    assert len(backend.found) == 1


@pytest.mark.parametrize("name", ["llama", "nanogpt"])
def test_compiled_training_step(name: str) -> None:
    model = transformed(name)
    expected = gradients(name, model)
    model.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    assert_same_gradients(gradients(name, model), expected)
    assert attnres_parameters(model).keys() <= expected.keys()


def test_compiled_training_step_with_checkpointing() -> None:
    model: Any = without_dropout(transformed("llama"))
    expected = gradients("llama", model)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False  # or the model logs that it sets this, which ends the graph
    model.compile(fullgraph=True, backend="aot_eager")
    assert_same_gradients(gradients("llama", model), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_compiled_layers(name: str) -> None:
    model = transformed(name)
    expected = {shape: run(name, model, compiled_inputs(name, *shape)) for shape in SHAPES}
    expected_gradients = gradients(name, model)
    for layer in model.model.layers if name == "llama" else model.transformer.h:
        layer.compile(backend="aot_eager")
    for shape in SHAPES:
        assert_close(run(name, model, compiled_inputs(name, *shape)), expected[shape])
    assert_same_gradients(gradients(name, model), expected_gradients)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_compiled_branches(name: str) -> None:
    """What lies between the reads and the adds, compiled by itself."""
    model = transformed(name)
    expected = run(name, model)
    for module in model.modules():
        if type(module).__name__.endswith(("MLP", "Attention")):
            module.compile(backend="aot_eager", fullgraph=True)
    assert_close(run(name, model), expected)


@pytest.mark.parametrize("name", [*NAMES, "t5"])
def test_export_with_dynamic_shapes(name: str) -> None:
    case, model = CASES[name], transformed(name)
    inputs = example(name, 2, 8)
    flags = {} if name == "nanogpt" else {"use_cache": False}
    # mypy knows no mapping of mixed values here
    shapes: Any = {**case.dynamic, **dict.fromkeys(flags)}
    program = export(model, (), {**inputs, **flags}, dynamic_shapes=shapes, strict=False)
    with CountOps() as eager, torch.no_grad():
        run(name, model)
    assert dict(targets(program.graph_module)) == eager.counts
    assert QUERY in program.state_dict
    exported = program.module()
    for shape in ((2, 8), (3, 11), (5, 4)):
        values: dict[str, Tensor] = example(name, *shape)
        with torch.no_grad():
            actual = case.output(exported(**values, **flags))
        assert_close(actual, run(name, model, values), str(shape))


def test_strict_export() -> None:
    model = transformed("nanogpt")
    inputs = example("nanogpt", 2, 8)
    program = export(model, (), inputs, dynamic_shapes=CASES["nanogpt"].dynamic, strict=True)
    assert sum(targets(program.graph_module).values()) >= 6
    values = example("nanogpt", 3, 11)
    with torch.no_grad():
        assert_close(program.module()(**values), run("nanogpt", model, values))


def test_exported_twice_from_a_copy() -> None:
    """Export leaves the model as it was: it runs as before, and exports again."""
    model = transformed("nanogpt")
    before = run("nanogpt", model)
    texts = []
    for each in (model, copy.deepcopy(model)):
        program = export(each, (), example("nanogpt"), strict=False)
        texts.append(str(program.graph))
    assert texts[0] == texts[1]
    assert torch.equal(run("nanogpt", model), before)


def test_aot_autograd_partitions_a_training_graph() -> None:
    model = transformed("nanogpt")
    kept: dict[str, Counter[str]] = {}

    def keep(label: str) -> Any:
        def compiler(module: fx.GraphModule, inputs: list[Any]) -> Any:
            kept[label] = targets(module)
            return module.forward

        return compiler

    backend = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))
    expected = gradients("nanogpt", model)
    model.compile(fullgraph=True, backend=backend)
    assert_same_gradients(gradients("nanogpt", model), expected)
    assert kept["forward"]["merge"] + kept["forward"]["depth_attention"] == 6


def test_zero_queries_compiled_equal_the_original() -> None:
    original, model = pair("llama")
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    inputs = compiled_inputs("llama", 3, 9)
    with torch.no_grad():
        assert_close(compiled(**inputs).logits, original(**inputs).logits)
