"""`backend="attnres"` with real models, broken graphs, and Inductor with its caches."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import attnres_compile as ac
from attnres_compile import inductor
from attnres_compile.backends import AttnResBackend
from attnres_compile.inductor import FEW_TOKENS, POST_GRAD, InInductor
from attnres_compile.passes.lower_factored import LowerFactored
from tests.integration.models import (
    BLOCKS,
    SHAPES,
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
from tests.integration.test_generate import generate, prompt
from tests.programs.parts import WIDTH, Block, Branch, Net
from tests.tolerances import assert_close, relative_error
from tests.zoo import noise, seeded

CONFIG = ac.AttnResConfig(num_blocks=BLOCKS)

# Dynamo asks each tensor that enters a compiled frame for its gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def recording(config: ac.AttnResConfig = CONFIG) -> tuple[AttnResBackend, Graphs]:
    graphs = Graphs()
    return AttnResBackend(config, inner=graphs), graphs


def operators(graphs: Graphs) -> set[str]:
    names = (str(node.target) for module in graphs.found for node in module.graph.nodes)
    return {name.split(".")[1] for name in names if name.startswith("attnres_compile.")}


def randomise_backend(backend: AttnResBackend) -> None:
    with torch.no_grad():
        for name, parameter in backend.named_parameters():
            values = noise(*parameter.shape)
            parameter.copy_(values * 2 / parameter.shape[-1] ** 0.5 if name.endswith("query") else 1 + 0.3 * values)


# Models of the zoo


@pytest.mark.parametrize(("name", "training"), [("nanogpt", True), ("llama", False)])
def test_transformed(name: str, training: bool) -> None:
    """The same dropout, numbers and gradients, from fused operators."""
    model: Any = transformed(name).train(training)
    expected, wanted = run(name, model), gradients(name, model)
    backend, graphs = recording()
    model.compile(backend=backend, fullgraph=True)
    assert_close(run(name, model), expected)
    found = gradients(name, model)
    assert attnres_parameters(model).keys() <= found.keys()
    assert_same_gradients(found, wanted)
    assert {"inter_block", "add_merge_norm"} <= operators(graphs)
    assert not list(backend.parameters())


@pytest.mark.parametrize("name", ["llama", pytest.param("siglip_vision", marks=pytest.mark.slow)])
def test_untransformed(name: str) -> None:
    """The backend finds the chains that the transform finds, and makes the same of them."""
    original, model = pair(name, random=True)
    expected = run(name, original)
    backend, graphs = recording()
    original.compile(backend=backend, fullgraph=True, dynamic=True)
    assert_close(run(name, original), expected)
    backend.load_state_dict(attnres_parameters(model))
    for shape in SHAPES:
        values = example(name, *shape)
        assert_close(run(name, original, values), run(name, model, values), str(shape))
    assert relative_error(run(name, original), expected) > 1e-3
    assert {"inter_block", "add_merge_norm"} <= operators(graphs)


def test_modes_share_the_parameters() -> None:
    original, model = pair("nanogpt", random=True)
    backend, graphs = recording()
    original.compile(backend=backend, fullgraph=True)
    run("nanogpt", original)
    backend.load_state_dict(attnres_parameters(model))
    for training in (True, False, True):
        expected = run("nanogpt", model.train(training))
        assert_close(run("nanogpt", original.train(training)), expected)
    assert len(list(backend.parameters())) == 2
    assert len(graphs.found) == 2


@pytest.mark.slow
def test_two_stacks() -> None:
    """An encoder and a decoder, together and the decoder alone, as in generation."""
    original, model = pair("t5", random=True)
    backend, _ = recording()
    original.compile(backend=backend)
    expected = run("t5", original)
    backend.load_state_dict(attnres_parameters(model))
    assert len(list(backend.parameters())) == 4
    actual = run("t5", original)
    assert_close(actual, run("t5", model))
    assert relative_error(actual, expected) > 1e-3
    values = example("t5")
    encoded = model.encoder(values.pop("input_ids"))
    found, wanted = (each(**values, encoder_outputs=encoded).logits for each in (original, model))
    assert_close(found, wanted)
    assert len(list(backend.parameters())) == 4


def test_generation() -> None:
    model = transformed("llama")
    expected = tokens_and_logits(model)
    backend, graphs = recording()
    model.compile(backend=backend, dynamic=True)
    actual = tokens_and_logits(model)
    assert torch.equal(actual[0], expected[0])
    assert_close(actual[1], expected[1])
    assert {"inter_block", "add_merge_norm"} <= operators(graphs)


def tokens_and_logits(model: Any) -> tuple[Tensor, Tensor]:
    options = {"cache_implementation": "static", "return_dict_in_generate": True, "output_logits": True}
    output: Any = generate(model, prompt("llama"), **options)
    return output.sequences, torch.stack(output.logits)


def test_checkpointing() -> None:
    model: Any = without_dropout(transformed("llama"))
    output, expected = run("llama", model), gradients("llama", model)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False  # or the model logs that it sets this, which ends the graph
    backend, graphs = recording()
    model.compile(fullgraph=True, backend=backend)
    assert_close(run("llama", model), output)
    assert_same_gradients(gradients("llama", model), expected)
    assert sum("checkpoint" in str(node.target) for node in graphs.found[0].graph.nodes) > 0


# Where nothing can be done


class PostNorm(Net):
    """A norm follows each add, so that no sum is kept."""

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(x + layer(x))
        return x


PLAIN = (lambda: nn.Sequential(nn.Linear(5, WIDTH), nn.ReLU(), Branch()), "no residual add")
HIDDEN = (lambda: PostNorm(2, Branch), "post-norm")


@pytest.mark.parametrize(("build", "reason"), [PLAIN, HIDDEN], ids=["no sum", "norm after each sum"])
def test_no_chain(build: Callable[[], nn.Module], reason: str) -> None:
    model, graphs = seeded(build), Graphs()
    call = torch.compile(model, backend=AttnResBackend(inner=graphs), dynamic=False)
    with pytest.warns(UserWarning, match=reason) as record:
        for shape in SHAPES:
            assert torch.equal(call(noise(*shape, 5)), model(noise(*shape, 5)))
    assert len(record) == 1 and "compiled as it is" in str(record[0].message)
    assert len(graphs.found) == 2 and not operators(graphs)
    strict = torch.compile(model, backend=recording()[0])
    with pytest.raises(BackendCompilerFailed, match=reason) as caught:
        strict(noise(2, 7, 5))
    assert isinstance(caught.value.inner_exception, ac.RefusedError)


# Broken graphs


class PrintingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        print(end="")
        return x + self.g(x)


class Unrolled(Net):
    """Dynamo leaves a loop with a break to Python, but not a sequence."""

    def middle(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))


class Shared(Net):
    """The same layer twice."""

    def middle(self, x: Tensor) -> Tensor:
        return self.layers[0](self.layers[0](x))


class Before(Net):
    def middle(self, x: Tensor) -> Tensor:
        print(end="")
        return super().middle(x)


class After(Net):
    def finish(self, x: Tensor) -> Tensor:
        print(end="")
        return super().finish(x)


def one_layer() -> nn.Module:
    model = Net(2)
    model.layers[1] = PrintingBlock()
    return model


BROKEN = {
    "one layer": one_layer,
    "sequence": lambda: Unrolled(2, PrintingBlock),
    "shared": lambda: Shared(1, PrintingBlock),
    "before": lambda: Before(2),
    "after": lambda: After(2),
}
broken = pytest.mark.parametrize("build", BROKEN.values(), ids=BROKEN.keys())


@broken
def test_a_broken_graph(build: Callable[[], nn.Module]) -> None:
    model, x = seeded(build), noise(2, 7, 5)
    backend, graphs = recording(ac.AttnResConfig(num_blocks=2, strict=False))
    with pytest.warns(UserWarning, match="no residual chain of this graph") as record:
        actual = torch.compile(model, backend=backend)(x)
    assert_close(actual, model(x))
    place = re.search(r"Dynamo broke the graph at (.*):(\d+); remove the break", str(record[0].message))
    assert place is not None and place[1] == __file__
    assert Path(__file__).read_text().splitlines()[int(place[2]) - 1].strip() == 'print(end="")'
    assert len(graphs.found) > 1


@broken
@pytest.mark.filterwarnings("ignore:no residual chain of this graph:UserWarning")
def test_a_broken_graph_of_a_transformed_model(build: Callable[[], nn.Module]) -> None:
    x = noise(2, 7, 5)
    model = ac.transform(seeded(build), x, num_blocks=2, verify="off")
    randomise(model)
    parameters = dict(model.named_parameters())
    backend, graphs = recording(ac.AttnResConfig(num_blocks=2, strict=False))
    found = []
    for call in (torch.compile(model, backend=backend), model):
        output = call(x)
        grads = torch.autograd.grad(projection(output), list(parameters.values()))
        found.append((output, dict(zip(parameters, grads, strict=True))))
    assert_close(found[0][0], found[1][0])
    assert_same_gradients(found[0][1], found[1][1])
    assert len(graphs.found) > 1 and not list(backend.parameters())


# Inductor


class Own(CustomGraphPass):
    """A user's pass that may be cached or not."""

    def __init__(self, uuid: Any) -> None:
        self.key, self.calls = uuid, 0

    def __call__(self, graph: fx.Graph) -> None:
        self.calls += 1

    def uuid(self) -> Any:
        return self.key


def in_inductor(tokens: int, before: Any) -> InInductor:
    return InInductor((LowerFactored(tokens, {}),), before)


def test_what_the_cache_key_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [in_inductor(*each).uuid() for each in ((0, None), (FEW_TOKENS, None), (0, Own("one")), (0, Own("two")))]
    keys = [*keys, *(in_inductor(*each).uuid() for each in ((0, None), (0, Own("one"))))]
    assert len(set(keys)) == 4 and keys[4] == keys[0] and keys[5] == keys[2]
    assert in_inductor(0, Own(None)).uuid() is None
    monkeypatch.setattr(inductor, "_digest", lambda: b"other sources")
    assert in_inductor(0, None).uuid() not in keys


def test_compiled_twice() -> None:
    """The second time everything comes from the caches, and is right; a user's pass without a name prevents that."""
    x = noise(2, 7, 5)
    model = ac.transform(seeded(lambda: Net(1)), x, num_blocks=2, verify="off")
    randomise(model)
    hits = []
    with fresh_cache():
        for slot in (None, None, Own(None)):
            torch._dynamo.reset()
            counters.clear()
            options: Any = {} if slot is None else {POST_GRAD: slot}
            with torch.no_grad():
                assert_close(torch.compile(model, backend="attnres", fullgraph=True, options=options)(x), model(x))
            hits.append((counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"]))
    assert hits == [(0, 0), (1, 1), (0, 0)]
    assert slot is not None and slot.calls == 1


def test_inductor_trains() -> None:
    original, x = seeded(lambda: Net(1)), noise(2, 7, 5)
    model = ac.transform(original, x, num_blocks=2, verify="off")
    randomise(model)
    parameters = dict(model.named_parameters())
    expected = model(x)
    wanted = torch.autograd.grad(projection(expected), list(parameters.values()))
    output = torch.compile(model, backend="attnres", fullgraph=True)(x)
    found = torch.autograd.grad(projection(output), list(parameters.values()))
    assert_close(output, expected)
    assert_same_gradients(dict(zip(parameters, found, strict=True)), dict(zip(parameters, wanted, strict=True)))


@pytest.mark.slow
def test_a_mode_of_inductor() -> None:
    original, model = pair("nanogpt", random=True)
    backend = AttnResBackend(CONFIG)
    original.compile(backend=backend, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        assert_close(run("nanogpt", original), run("nanogpt", pair("nanogpt")[1]))
        backend.load_state_dict(attnres_parameters(model))
        assert_close(run("nanogpt", original), run("nanogpt", model))
