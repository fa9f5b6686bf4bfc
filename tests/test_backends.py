"""The backend as an object: what it hands on, and whose parameters it keeps."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import get_hash_for_files

import attnres_compile as ac
from attnres_compile import backends, inductor
from attnres_compile.backends import AttnResBackend
from attnres_compile.inductor import FEW_TOKENS, POST_GRAD
from tests.integration.models import Graphs, assert_same_gradients, projection, randomise
from tests.programs.parts import WIDTH, Net
from tests.tolerances import assert_close, relative_error
from tests.zoo import noise, seeded

CONFIG = ac.AttnResConfig(num_blocks=2)
NAMES = ["attnres.0.query", "attnres.0.key_norm"]
SIZES = ((2, 7), (3, 11))

# Dynamo asks each tensor that enters a compiled frame for its gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(threads)


def net(depth: int = 2, seed: int = 0) -> Net:
    return seeded(lambda: Net(depth), seed)


def transformed(model: nn.Module, config: ac.AttnResConfig = CONFIG) -> Any:
    """The transformed twin with random queries."""
    twin = ac.transform(model, batch(), num_blocks=config.num_blocks, block_size=config.block_size, verify="off")
    randomise(twin)
    return twin


def batch(size: int = 2, length: int = 7) -> Tensor:
    return noise(size, length, 5)


def recording(config: ac.AttnResConfig = CONFIG) -> tuple[AttnResBackend, Graphs]:
    graphs = Graphs()
    return AttnResBackend(config, inner=graphs), graphs


def compiled(model: nn.Module, backend: Any, **options: Any) -> Callable[[Tensor], Tensor]:
    call: Any = torch.compile(model, backend=backend, fullgraph=True, **options)
    return call


def calls(module: fx.GraphModule) -> Counter[str]:
    """How often each of the library's operators is called."""
    names = (str(node.target) for node in module.graph.nodes if node.op == "call_function")
    return Counter(name.split(".")[1] for name in names if name.startswith("attnres_compile."))


def step(call: Callable[[Tensor], Tensor], parameters: dict[str, nn.Parameter], x: Tensor) -> Any:
    """The output and the gradients by name."""
    output = call(x)
    found = torch.autograd.grad(projection(output), list(parameters.values()))
    return output, dict(zip(parameters, found, strict=True))


# Transformed models


def test_transformed() -> None:
    model = transformed(net())
    parameters = dict(model.named_parameters())
    output, found = step(compiled(model, AttnResBackend(inner="aot_eager")), parameters, batch())
    expected, wanted = step(model, parameters, batch())
    assert_close(output, expected)
    assert_same_gradients(found, wanted)


def test_one_fused_graph_for_every_shape_and_query() -> None:
    model = transformed(net())
    backend, graphs = recording()
    call = compiled(model, backend, dynamic=True)
    for size in SIZES:
        before = call(batch(*size))
        assert_close(before, model(batch(*size)), str(size))
    with torch.no_grad():
        model.get_parameter(NAMES[0]).neg_()
    after = call(batch(*SIZES[1]))
    assert_close(after, model(batch(*SIZES[1])))
    assert relative_error(after, before) > 1e-3
    assert len(graphs.found) == 1
    found = calls(graphs.found[0])
    assert found["inter_block"] == 1 and found["add_merge_norm"] and found["merge_norm"]
    assert sum(found[name] for name in ("merge", "merge_norm", "add_merge_norm", "depth_attention")) == 4
    assert not list(backend.parameters())


def test_autograd_with_dynamic_shapes() -> None:
    model = transformed(net(1))
    parameters = dict(model.named_parameters())
    call = compiled(model, AttnResBackend(inner="aot_eager"), dynamic=True)
    for size, stance in zip(SIZES, ("default", "fail_on_recompile"), strict=True):
        with torch.compiler.set_stance(stance):
            output, found = step(call, parameters, batch(*size))
        expected, wanted = step(model, parameters, batch(*size))
        assert_close(output, expected, str(size))
        assert_same_gradients(found, wanted)


def test_transformed_under_autocast() -> None:
    model = transformed(net())
    parameters = dict(model.named_parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, found = step(compiled(model, AttnResBackend(inner="aot_eager")), parameters, batch())
        expected, wanted = step(model, parameters, batch())
    assert output.dtype == expected.dtype == torch.bfloat16
    assert_close(output, expected)
    # Gradients have the parameters' dtype, and the exactness of what they were computed in.
    assert {name: g.dtype for name, g in found.items()} == {name: g.dtype for name, g in wanted.items()}
    assert_same_gradients({name: g.bfloat16() for name, g in found.items()}, wanted)


# What is handed on


class Options:
    """A compiler that keeps the options it is given."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def __call__(self, module: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        self.seen.append(options)
        return module.forward


@pytest.mark.parametrize("given", [{}, {"mode": "reduce-overhead"}, {"options": {"max-autotune": True}}])
def test_mode_and_options_are_handed_on(given: dict[str, Any]) -> None:
    inner = Options()
    compiled(net(1), AttnResBackend(ac.AttnResConfig(), inner=inner), **given)(batch())
    assert inner.seen == [given]


def test_options_for_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    patches: list[dict[str, Any]] = []

    def compile_fx(module: fx.GraphModule, inputs: Any, *, config_patches: dict[str, Any]) -> Any:
        patches.append(config_patches)
        return module.forward

    def own(graph: fx.Graph) -> None:
        raise NotImplementedError

    monkeypatch.setattr(inductor, "compile_fx", compile_fx)
    model = transformed(net(1))
    compiled(model, AttnResBackend(), options={"max-autotune": True, POST_GRAD: own})(batch())
    with torch.no_grad():
        compiled(model, AttnResBackend(), mode="reduce-overhead")(batch())
    training, inference = patches
    assert training["max_autotune"] is True and training[POST_GRAD].before == (own,)
    assert training[POST_GRAD].pipeline[0].tokens == 0
    assert inference["triton.cudagraphs"] is True
    assert inference[POST_GRAD].before == () and inference[POST_GRAD].pipeline[0].tokens == FEW_TOKENS


def test_the_digest_is_of_every_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    digest: Any = inductor._digest
    monkeypatch.setattr(inductor, "__file__", str(tmp_path / "inductor.py"))
    found = []
    for path, text in (("inductor.py", "1"), ("ops/triton/a.py", "2"), ("ops/triton/a.py", "3"), ("notes.txt", "4")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        get_hash_for_files.cache_clear()
        found.append(digest.__wrapped__())
    assert len(set(found)) == 3 and found[3] == found[2]


# Parameters for models without reads


def test_untransformed() -> None:
    """Zero queries change no number, neither forward nor backward, and get gradients of their own."""
    model, backend = net(), AttnResBackend(CONFIG, inner="aot_eager")
    call = compiled(model, backend)
    assert_close(call(batch()), model(batch()))
    ours = dict(backend.named_parameters())
    assert list(ours) == NAMES and list(ours.values()) == list(backend.parameters())
    assert [tuple(p.shape) for p in ours.values()] == [(4, WIDTH)] * 2
    parameters = dict(model.named_parameters())
    _, wanted = step(model, parameters, batch())
    _, found = step(call, parameters | ours, batch())
    queries, key_norms = (found.pop(name) for name in NAMES)
    assert_same_gradients(found, wanted)
    assert queries.any(dim=-1).all() and not key_norms.any()
    assert ours == dict(backend.named_parameters())


def test_equal_to_the_transformed_model_with_the_same_queries() -> None:
    model = net()
    twin = transformed(model)
    backend, graphs = recording()
    call = compiled(model, backend)
    before = call(batch())
    twins = dict(twin.named_parameters())
    backend.load_state_dict({name: twins[name] for name in NAMES})
    after = call(batch())
    assert relative_error(after, before) > 1e-3
    assert_close(after, twin(batch()))
    # a trained backend's parameters go into a transformed model as they are
    with torch.no_grad():
        next(backend.parameters()).neg_()
    twin.load_state_dict(backend.state_dict(), strict=False)
    assert_close(call(batch()), twin(batch()))
    assert relative_error(call(batch()), after) > 1e-3
    assert len(graphs.found) == 1


def test_trains_as_the_transformed_model_does() -> None:
    model = net()
    twin = transformed(model)
    backend = AttnResBackend(CONFIG, inner="aot_eager")
    call = compiled(model, backend)
    call(batch())
    backend.load_state_dict({name: twin.get_parameter(name) for name in NAMES})
    parameters = dict(twin.named_parameters())
    output, found = step(call, dict(model.named_parameters()) | dict(backend.named_parameters()), batch())
    expected, wanted = step(twin, parameters, batch())
    assert_close(output, expected)
    assert_same_gradients(found, wanted)


def test_every_recompilation_has_the_same_parameters() -> None:
    model: Any = net(1)
    backend, graphs = recording()
    call = compiled(model, backend)
    before = call(batch())
    ours = list(backend.parameters())
    randomise_all(ours)
    expected = call(batch())
    assert relative_error(expected, before) > 1e-3
    with torch.no_grad():
        assert_close(call(batch()), expected)
    assert_close(call(batch().repeat(2, 1, 1))[:2], expected)
    torch._dynamo.reset()
    model.embed.requires_grad_(False)
    assert_close(call(batch()), expected)
    assert len(graphs.found) == 4
    assert list(map(id, backend.parameters())) == list(map(id, ours))


def randomise_all(parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(noise(*parameter.shape) / 2)


def test_models_of_one_class_have_their_own() -> None:
    """They share their code, and Dynamo what it compiled for it."""
    first, second = net(), net(seed=1)
    backend, _ = recording()
    calling = [compiled(each, backend) for each in (first, second)]
    for call in calling:
        call(batch())
    assert [name for name, _ in backend.named_parameters()] == [*NAMES, "attnres.1.query", "attnres.1.key_norm"]
    randomise_all(list(backend.parameters())[:2])
    assert relative_error(calling[0](batch()), first(batch())) > 1e-3
    assert_close(calling[1](batch()), second(batch()))


class Stacks(Net):
    """Two stacks that read their inputs first; one of them may be left out."""

    def __init__(self) -> None:
        super().__init__(2)
        self.more = Net(2)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        first, second = self.embed(x), self.more.embed(x)
        result = self.finish(self.middle(first)) * 0.5 if both else 0
        return self.more.finish(self.more.middle(second)) + result


def test_a_stack_keeps_its_parameters_when_the_other_is_left_out() -> None:
    backend, _ = recording()
    model: Any = seeded(Stacks)
    call: Any = compiled(model, backend)
    whole = call(batch())
    ours = list(backend.parameters())
    assert len(ours) == 4
    randomise_all(ours)
    alone = call(batch(), both=False)
    assert list(map(id, backend.parameters())) == list(map(id, ours))
    assert relative_error(alone, model.more(batch())) > 1e-3
    assert relative_error(call(batch()), whole) > 1e-3


def test_a_stream_that_comes_from_outside() -> None:
    backend, graphs = recording()
    model = nn.Sequential(*net().layers)
    call, x = compiled(model, backend), noise(2, 7, WIDTH)
    before = call(x)
    assert_close(before, model(x))
    kinds = [node.op == "placeholder" for node in graphs.found[0].graph.nodes]
    assert kinds == sorted(kinds, reverse=True)
    randomise_all(list(backend.parameters()))
    assert relative_error(call(x), before) > 1e-3


def test_parameters_are_as_the_models_under_autocast() -> None:
    model = net()
    backend, _ = recording()
    call = compiled(model, backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = call(batch())
        assert output.dtype == torch.bfloat16
        assert_close(output, model(batch()))
    assert {p.dtype for p in backend.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("config", "blocks"),
    [
        (ac.AttnResConfig(num_blocks=1), 0),
        (ac.AttnResConfig(block_size=1), 4),
        (ac.AttnResConfig(block_size=2), 2),
        (ac.AttnResConfig(strict=False), 4),
    ],
)
def test_the_configs_blocks(config: ac.AttnResConfig, blocks: int) -> None:
    """The last block is not yet finished for the last read; a block of its own has no first phase."""
    model = net()
    twin = transformed(model, config)
    backend, graphs = recording(config)
    call = compiled(model, backend)
    call(batch())
    backend.load_state_dict({name: twin.get_parameter(name) for name in NAMES})
    assert_close(call(batch()), twin(batch()))
    phases = graphs.found[0].graph.find_nodes(op="call_function", target=torch.ops.attnres_compile.inter_block.default)
    assert max((len(node.args[0]) for node in phases), default=0) == blocks


# State


def test_state_before_the_first_call() -> None:
    backend = AttnResBackend()
    assert backend.state_dict() == {} and list(backend.parameters()) == []
    with pytest.raises(ac.InputError, match="call the compiled model once"):
        backend.load_state_dict({NAMES[0]: torch.zeros(4, WIDTH)})


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop(NAMES[1]),
        lambda state: state.update(other=torch.ones(1)),
        lambda state: state.update({NAMES[1]: torch.ones(5, WIDTH)}),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_a_state_that_does_not_fit(change: Callable[[Any], Any]) -> None:
    backend, _ = recording()
    compiled(net(), backend)(batch())
    before = {name: value.clone() for name, value in backend.state_dict().items()}
    state = {name: value + 1 for name, value in before.items()}
    change(state)
    with pytest.raises(ac.InputError, match="the state has"):
        backend.load_state_dict(state)
    assert list(backend.state_dict()) == NAMES
    assert all(torch.equal(backend.state_dict()[name], value) for name, value in before.items())


# The entry point


def test_the_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "attnres" in torch._dynamo.list_backends()
    backend, graphs = recording()
    monkeypatch.setattr(backends, "default_backend", backend)
    model = net()
    assert_close(compiled(model, "attnres")(batch()), model(batch()))
    assert len(graphs.found) == 1 and len(list(backend.parameters())) == 2
