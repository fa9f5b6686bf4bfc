"""Front ends, in their order, and what their graphs bring along."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from attnres_compile import transform
from attnres_compile.capture import trace
from attnres_compile.capture.inputs import Inputs
from attnres_compile.capture.trace import Captured, capture, from_graph, from_program
from attnres_compile.errors import AttnResError, CaptureError
from tests.own_models import torch_encoder
from tests.passes.models import WIDTH, Net
from tests.passes.tracing import example, operations
from tests.tolerances import assert_close

INPUTS = Inputs((example(),), {})


def fails(message: str) -> Callable[..., Captured]:
    def front_end(*_: Any, **__: Any) -> Captured:
        raise ValueError(message)

    return front_end


def strict_fails(*, strict: bool) -> Callable[..., Any]:
    export = torch.export.export

    def front_end(*args: Any, **kwargs: Any) -> Any:
        if kwargs["strict"] == strict:
            raise ValueError(f"strict={strict}")
        return export(*args, **kwargs)

    return front_end


def output(captured: Captured) -> Tensor:
    result: Any = captured.module(*captured.inputs)
    return result[0] if isinstance(result, tuple) else result


def test_export_comes_first() -> None:
    model = Net()
    captured = capture(model, INPUTS)
    assert captured.front_end == "torch.export"
    assert captured.program is not None
    assert_close(output(captured), model.eval()(example()))
    assert all("val" in node.meta for node in captured.module.graph.nodes if node.op == "call_function")


def test_dynamo_comes_second(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    monkeypatch.setattr(torch.export, "export", strict_fails(strict=False))
    captured = capture(model, INPUTS)
    assert captured.front_end == "Dynamo"
    assert_close(output(captured), model.eval()(example()))


def test_symbolic_trace_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    monkeypatch.setattr(trace, "_export", fails("no export"))
    captured = capture(model, INPUTS)
    assert captured.front_end == "symbolic trace"
    assert captured.program is None
    assert_close(output(captured), model.eval()(example()))
    nodes = {node.name: node for node in captured.module.graph.nodes}
    assert tuple(nodes["add"].meta["val"].shape) == (2, 5, WIDTH)
    assert "models.py" in nodes["add"].meta["stack_trace"]
    # leaves of torch.nn are called; what holds modules is traced into
    assert nodes["layers_0_f_linear"].op == "call_module"


def test_symbolic_trace_takes_keywords_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    class Keywords(Net):
        def forward(self, x: Tensor, mask: Tensor | None = None, double: bool = False) -> Tensor:
            y = super().forward(x)
            y = y if mask is None else y * mask
            return y * 2 if double else y

    model = Keywords()
    monkeypatch.setattr(trace, "_export", fails("no export"))
    mask = torch.ones(5, 1)
    captured = capture(model, Inputs((example(),), {"mask": mask, "double": True}))
    assert_close(output(captured), model.eval()(example(), mask, True))


def test_every_front_end_is_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(model: nn.Module, inputs: Inputs, *, strict: bool) -> Captured:
        raise TypeError(f"strict is {strict}\n\nsecond line\nthird line\nfourth line" + "x" * 1000)

    monkeypatch.setattr(trace, "_export", export)
    monkeypatch.setattr(trace, "_symbolic_trace", fails("proxies cannot do this"))
    monkeypatch.setattr(trace, "_run", fails("nor can a run"))
    with pytest.raises(CaptureError) as caught:
        capture(Net(), INPUTS)
    assert isinstance(caught.value, AttnResError)
    assert str(caught.value).splitlines() == [
        "Net could not be traced:",
        "  torch.export: TypeError: strict is False second line third line",
        "  Dynamo: TypeError: strict is True second line third line",
        "  symbolic trace: ValueError: proxies cannot do this",
        "  a run: ValueError: nor can a run",
    ]


class Experts(nn.Module):
    """A layer whose experts are called for the tokens that chose them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mix, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norms[0](x))
        h = self.norms[1](x)
        chosen, branch = self.router(h).argmax(-1), torch.zeros_like(h)
        for expert in chosen.unique().tolist():
            tokens = torch.where(chosen == expert)
            branch[tokens] = self.experts[expert](h[tokens])
        return x + branch


class Dispatching(nn.Module):
    """Such layers, and an exit that depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, x: Tensor, *, double: bool = False) -> dict[str, Tensor | None]:
        x = self.embedding(x)
        for layer in self.layers:
            if float(x.detach().abs().max()) < 1e9:
                x = layer(x)
        return {"x": self.norm(x) * (2 if double else 1), "nothing": None}


def test_a_run_follows_what_depends_on_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_export", fails("quicker so"))
    torch.manual_seed(0)
    model, x = Dispatching().eval(), example(2, 5, WIDTH)
    generator = torch.get_rng_state()
    captured = capture(model, Inputs((x,), {"double": True}))
    assert (captured.front_end, captured.program) == ("a run", None)
    assert torch.equal(torch.get_rng_state(), generator)
    found, _ = captured.module(*captured.inputs)
    assert_close(found, model(x, double=True)["x"])
    add = next(node for node in captured.module.graph.nodes if str(node.target).startswith("aten.add."))
    assert [path for path, _ in add.meta["nn_module_stack"].values()][-1] == "layers.0"
    assert "test_trace.py" in add.meta["stack_trace"]
    report: Any = transform(model, x, num_blocks=3).attnres_report
    assert [chain.adds for chain in report.chains] == [6]
    assert all(check.passed for check in report.checks)


class Stateful(Net):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.seen + 1
        return super().forward(x)


def test_the_model_is_left_alone() -> None:
    model = Stateful().train()
    generator = torch.get_rng_state()
    capture(model, INPUTS)
    assert (model.calls, float(model.seen), model.training) == (0, 0.0, True)
    assert torch.equal(torch.get_rng_state(), generator)


def test_the_graph_is_of_eval_mode() -> None:
    class Dropped(Net):
        def middle(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().middle(x), 0.5, self.training)

    captured = capture(Dropped().train(), INPUTS)
    assert torch.equal(output(captured), output(captured))


def test_fused_encoders_show_their_adds() -> None:
    """PyTorch's encoder layer has a fused path in eval mode without gradients."""
    fast = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        captured = capture(torch_encoder(1, WIDTH, 2, 0.0), Inputs((example(2, 5, WIDTH),), {}))
    assert sum(name.startswith("aten.add") for name in operations(captured.module)) >= 2
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_warnings_of_a_trace_are_kept_quiet(recwarn: pytest.WarningsRecorder) -> None:
    capture(Stateful(), INPUTS)
    assert not recwarn.list


class Arguments(nn.Module):
    """Keywords in another order than the parameters, a nested one, a number and a None; a buffer and a constant."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(3))
        self.constant = torch.full((3,), 2.0)

    def forward(
        self, a: Tensor, b: Tensor | None = None, c: dict[str, Any] | None = None, scale: float = 1.0
    ) -> Tensor:
        assert c is not None
        x = self.linear(a) * scale + self.shift * self.constant
        x = x + c["x"][0] - 3 * c["y"]
        return x if b is None else x - b


A, B, C, D = (example(2, 3, seed=seed) for seed in range(4))


@pytest.mark.parametrize(
    "inputs",
    [
        Inputs((A, B, {"x": (C,), "y": D}, 2.0), {}),
        Inputs((A,), {"b": B, "c": {"x": (C,), "y": D}}),
        Inputs((A,), {"scale": 0.5, "c": {"x": (C,), "y": D}, "b": B}),
        Inputs((), {"c": {"y": D, "x": (C,)}, "b": B, "a": A}),
        Inputs((A, None), {"c": {"x": (C,), "y": D}}),
    ],
    ids=range(5),
)
def test_inputs_of_the_graph(inputs: Inputs) -> None:
    model = Arguments()
    captured = capture(model, inputs)
    assert captured.front_end == "torch.export"
    assert_close(output(captured), model(*inputs.args, **inputs.kwargs))
    marked = {node.name for node in captured.module.graph.nodes if node.meta.get("is_parameter")}
    assert marked == {"p_linear_weight", "p_linear_bias", "b_shift", "c_constant"}


def test_from_program() -> None:
    model = Net().eval()
    program = torch.export.export(model, INPUTS.args)
    captured = from_program(program, INPUTS)
    assert captured.program is program
    assert len(captured.inputs) == len(captured.module.graph.find_nodes(op="placeholder"))
    assert_close(output(captured), model(example()))


def test_from_graph() -> None:
    model = Net().eval()
    module = fx.symbolic_trace(model)
    captured = from_graph(module, INPUTS)
    assert (captured.front_end, captured.program) == ("fx graph", None)
    shapes = {node.name: tuple(node.meta["val"].shape) for node in module.graph.nodes if node.op == "call_function"}
    assert set(shapes.values()) == {(2, 5, WIDTH)}
    assert_close(output(captured), model(example()))


def test_from_graph_with_values() -> None:
    """Values that are there already are kept, and no inputs are needed."""
    module = capture(Net(), INPUTS).module
    before = {node: node.meta.get("val") for node in module.graph.nodes}
    captured = from_graph(module, Inputs((), {}))
    assert all(node.meta.get("val") is value for node, value in before.items())
    assert captured.module is module


def test_from_graph_with_defaults_and_keywords() -> None:
    class Added(nn.Module):
        def forward(self, x: Tensor, y: Tensor, scale: float = 2.0) -> Tensor:
            return (x + y) * scale

    module = fx.symbolic_trace(Added())
    captured = from_graph(module, Inputs((A,), {"y": B}))
    assert captured.inputs[2] == 2.0
    assert_close(output(captured), (A + B) * 2)
