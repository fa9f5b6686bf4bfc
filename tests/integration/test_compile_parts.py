"""What meets compilers halfway: checkpointing, parts compiled by themselves, AOTAutograd, strict export.

AOTAutograd with symbolic shapes takes half a minute for a transformer: it has a model of MLPs here, the others stop
behind Dynamo.
"""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.export import export

import attnres_compile as ac
from tests.integration.models import (
    BLOCKS,
    READS,
    SHAPES,
    CountOps,
    Graphs,
    assert_same_gradients,
    attnres_parameters,
    example,
    gradients,
    pair,
    projection,
    randomise,
    run,
    transformed,
    without_dropout,
)
from tests.programs import PROGRAMS
from tests.programs.parts import Net
from tests.tolerances import assert_close
from tests.zoo import CASES, noise, seeded

# Dynamo asks each tensor that enters a compiled frame for its gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def calls(module: fx.GraphModule) -> Counter[str]:
    """How often each of the library's operators is called."""
    names = (str(node.target) for node in module.graph.nodes if node.op == "call_function")
    return Counter(name.split(".")[1] for name in names if name.startswith("attnres_compile."))


def counted(model: nn.Module, name: str) -> dict[str, int]:
    with CountOps() as counts, torch.no_grad():
        run(name, model)
    assert counts.reads == READS
    return counts.counts


def mlps(build: Callable[[], nn.Module], blocks: int = BLOCKS) -> Any:
    model = ac.transform(seeded(build), noise(2, 7, 5), num_blocks=blocks, verify="off")
    randomise(model)
    return model


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    output: Tensor = model(x)
    found = torch.autograd.grad(projection(output), list(model.parameters()))
    return output, dict(zip(dict(model.named_parameters()), found, strict=True))


def test_aot_autograd_with_dynamic_shapes() -> None:
    model = mlps(lambda: Net(1), blocks=2)
    compiled = copy.deepcopy(model)
    compiled.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in SHAPES:
        (actual, found), (expected, wanted) = (step(each, noise(*shape, 5)) for each in (compiled, model))
        assert_close(actual, expected, str(shape))
        assert_same_gradients(found, wanted)


def test_aot_autograd_partitions_a_training_graph() -> None:
    model = transformed("nanogpt")
    kept: dict[str, Counter[str]] = {}

    def keep(label: str) -> Any:
        def compiler(module: fx.GraphModule, inputs: list[Any]) -> Any:
            kept[label] = calls(module)

            def boxed(values: list[Any]) -> Any:
                return module.forward(*values)

            boxed._boxed_call = True  # type: ignore[attr-defined]
            return boxed

        return compiler

    expected = gradients("nanogpt", model)
    model.compile(fullgraph=True, backend=aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward")))
    assert_same_gradients(gradients("nanogpt", model), expected)
    assert kept["forward"]["merge"] + kept["forward"]["depth_attention"] == READS
    assert attnres_parameters(model).keys() <= expected.keys()


def test_compiled_with_checkpointing() -> None:
    model: Any = without_dropout(transformed("llama"))
    output, expected = run("llama", model), gradients("llama", model)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False  # or the model logs that it sets this, which ends the graph
    model.compile(fullgraph=True, backend=Graphs())
    assert_close(run("llama", model), output)
    assert_same_gradients(gradients("llama", model), expected)


@pytest.mark.parametrize(("name", "backend"), [("CheckpointedLayers", "aot_eager"), ("CheckpointedLambdas", "eager")])
def test_compiled_checkpoints(name: str, backend: str) -> None:
    model = mlps(PROGRAMS[name].build)
    output, expected = step(model, noise(2, 7, 5))
    model.compile(fullgraph=True, backend=backend)
    actual, found = step(model, noise(2, 7, 5))
    assert_close(actual, output)
    assert_same_gradients(found, expected)


class Broken(Net):
    """The graph ends between the layers."""

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


def whole(model: Any) -> None:
    model.compile(backend=Graphs())


def middle(model: Any) -> None:
    model.middle = torch.compile(model.middle, backend=Graphs())


def every_layer(model: Any) -> None:
    for layer in model.layers:
        layer.compile(backend=Graphs())


def one_layer(model: Any) -> None:
    model.layers[1].compile(backend=Graphs())


def every_forward(model: Any) -> None:
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend=Graphs())


def every_branch(model: Any) -> None:
    for layer in model.layers:
        layer.f.compile(backend=Graphs(), fullgraph=True)


PARTS = [middle, every_layer, one_layer, every_forward, every_branch]


@pytest.mark.parametrize(("build", "compile_parts"), [*((Net, part) for part in PARTS), (Broken, whole)])
def test_compiled_in_parts(build: Callable[[], nn.Module], compile_parts: Callable[[Any], None]) -> None:
    model = mlps(build)
    output, expected = step(model, noise(2, 7, 5))
    compile_parts(model)
    actual, found = step(model, noise(2, 7, 5))
    assert_close(actual, output)
    assert_same_gradients(dict(zip(expected, found.values(), strict=True)), expected)


def test_compiled_layers() -> None:
    model = transformed("llama")
    expected, wanted = run("llama", model), gradients("llama", model)
    for layer in model.model.layers:
        layer.compile(backend=Graphs())
    assert_close(run("llama", model), expected)
    assert_same_gradients(gradients("llama", model), wanted)


def test_strict_export() -> None:
    model = transformed("nanogpt")
    program = export(model, (), example("nanogpt", 2, 8), dynamic_shapes=CASES["nanogpt"].dynamic, strict=True)
    assert dict(calls(program.graph_module)) == counted(model, "nanogpt")
    values = example("nanogpt", 3, 11)
    with torch.no_grad():
        assert_close(program.module()(**values), run("nanogpt", model, values))


def test_export_leaves_the_model_as_it_was() -> None:
    model = transformed("nanogpt")
    before = run("nanogpt", model)
    graphs = [str(export(each, (), example("nanogpt"), strict=False).graph) for each in (model, copy.deepcopy(model))]
    assert graphs[0] == graphs[1]
    assert torch.equal(run("nanogpt", model), before)


def test_one_graph_for_an_output_that_is_a_tensor() -> None:
    """The hook at the root's exit runs outside the graph of the forward: it must not make one of its own."""
    original, model = pair("nanogpt")
    backend = Graphs()
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for shape in SHAPES:
        values = example("nanogpt", *shape)
        with torch.no_grad():
            assert_close(compiled(**values), original(**values))
    assert len(backend.found) == 1
