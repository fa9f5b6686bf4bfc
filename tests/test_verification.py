"""Every check can fail, names what failed, and leaves both models as they were."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.capture.inputs import Inputs
from attnres_compile.errors import InputError, RefusedError, VerificationError
from attnres_compile.report import Check
from attnres_compile.verification import raise_failures, relative_error, run_checks, tensors
from tests.passes.models import WIDTH, Block, Net, Pair
from tests.passes.tracing import example

INPUTS = Inputs((example(),), {})
FORWARD, SECOND = "zero queries equal the original", "the same at a second shape"
EVAL, TRAINING = "gradients in eval mode", "outputs and gradients in training mode"
RANDOM, DEAD = "random queries change the output", "chains whose queries get no gradient"


def pair(make: Callable[[], nn.Module] = Net) -> tuple[Any, Any]:
    torch.manual_seed(0)
    original = make().eval()
    return original, ac.transform(original, example(), verify="off", block_size=2)


def failed(original: nn.Module, model: nn.Module, pushes: dict[int, int] | None = None, mode: Any = "full") -> set[str]:
    return {check.name for check in run_checks(original, model, INPUTS, pushes, mode) if not check.passed}


def hook(module: nn.Module, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
    module.register_forward_hook(lambda m, args, out: function(m, out))


def test_all_pass() -> None:
    original, model = pair()
    checks = run_checks(original, model, INPUTS, {0: 4}, "full")
    assert [check.name for check in checks] == [
        FORWARD,
        "pushes seen 4 = adds found 4",
        SECOND,
        EVAL,
        TRAINING,
        RANDOM,
        DEAD,
        "reads made 4 = rows 4",
    ]
    assert all(check.passed for check in checks)
    raise_failures(checks, "Net")


def test_modes() -> None:
    original, model = pair()
    assert run_checks(original, model, INPUTS, {0: 4}, "off") == []
    quick = [check.name for check in run_checks(original, model, INPUTS, None, "quick")]
    assert quick == [FORWARD, RANDOM, DEAD]


def test_trained_queries_pass_too() -> None:
    original, model = pair()
    torch.nn.init.normal_(model.attnres[0].query)
    torch.nn.init.normal_(model.attnres[0].key_norm)
    assert failed(original, model) == set()


def test_scaled_branch() -> None:
    original, model = pair()
    hook(model.layers[0].f, lambda m, out: out * 1.01)
    assert failed(original, model) == {FORWARD, SECOND, EVAL, TRAINING}
    assert failed(original, model, mode="quick") == {FORWARD}


def test_only_another_length() -> None:
    original, model = pair()
    hook(model.layers[0].f, lambda m, out: out if out.shape[1] == 5 else out * 1.01)
    assert failed(original, model) == {SECOND}


def test_only_in_training() -> None:
    original, model = pair()
    hook(model.layers[0].f, lambda m, out: out * 1.01 if m.training else out)
    assert failed(original, model) == {TRAINING}


def test_only_the_gradients() -> None:
    original, model = pair()
    hook(model.layers[0].f, lambda m, out: 2 * out - out.detach())
    assert failed(original, model) == {EVAL, TRAINING}


def test_lost_gradients() -> None:
    original, model = pair()
    hook(model.layers[0].f.linear, lambda m, out: out.detach())
    names = failed(original, model)
    assert {name.partition(" (")[0] for name in names} == {EVAL, TRAINING}
    (count,) = {name.partition(" (")[2] for name in names}
    # the branch's norm and weight, of three linears and five norms
    assert count == "4 of 20 lost, first layers.0.f.norm.weight)"


def test_detached_chain() -> None:
    """The queries are read, and the loss does not depend on them."""
    original, model = pair()
    for twin in (original, model):
        hook(twin.layers[1], lambda m, out: out * 0 + 1.0)
    assert RANDOM in failed(original, model)
    original, model = pair()
    for twin in (original, model):
        twin.norm.register_forward_pre_hook(lambda m, args: (args[0].detach(),))
    assert failed(original, model) == {f"{DEAD} (0)"}
    with pytest.raises(RefusedError, match=r"do not depend on the reads of every chain .*\(0\).* with `chains=`"):
        raise_failures(run_checks(original, model, INPUTS, None, "quick"), "Net")


def test_wrong_number_of_pushes() -> None:
    original, model = pair()
    checks = run_checks(original, model, INPUTS, {0: 5}, "quick")
    (wrong,) = (check for check in checks if not check.passed)
    assert (wrong.name, wrong.error) == ("pushes seen 4 = adds found 5", 1.0)
    with pytest.raises(RefusedError, match=r"streams of Net are not those .* seen 4 = adds found 5.* exported program"):
        raise_failures(checks, "Net")
    # two wrongs make no right: too many in one chain do not make up for too few in another
    (wrong, *_) = (check for check in run_checks(original, model, INPUTS, {0: 2, 1: 2}, "quick") if not check.passed)
    assert (wrong.name, wrong.error) == ("pushes seen 4 = adds found 4", 4.0)


def test_missing_reads() -> None:
    original, model = pair()
    # the final norm's hook is what made its read
    model.norm._forward_pre_hooks.clear()
    model.norm.forward = lambda x: F.layer_norm(x.total(), (WIDTH,), model.norm.weight, model.norm.bias)
    assert "reads made 3 = rows 4" in failed(original, model, {0: 4})


class Dropped(Pair):
    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.f(x), 0.5, self.training)
        return x + F.dropout(self.g(x), 0.5, self.training)


def test_random_numbers_in_another_order() -> None:
    original, model = pair(lambda: Net(Dropped(), Dropped()))
    assert failed(original, model) == set()
    hook(model.layers[0].f, lambda m, out: out if not m.training else out + 0 * torch.rand(()))
    assert failed(original, model) == {TRAINING}


class Counting(Block):
    """Each call changes the module: the checks run on copies."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return super().forward(x) * (1 + self.seen)


def test_models_are_left_as_they_were() -> None:
    original, model = pair(lambda: Net(Counting(), Counting()))
    model.train()
    original.layers[0].eval()
    torch.nn.init.normal_(model.attnres[0].query)
    states = [copy.deepcopy(m.state_dict()) for m in (original, model)]
    modes = [[module.training for module in m.modules()] for m in (original, model)]
    generator = torch.get_rng_state()
    run_checks(original, model, INPUTS, {0: 4}, "full")
    ac.verify(original, model, example())
    for m, state, mode in zip((original, model), states, modes, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in m.state_dict().items())
        assert [module.training for module in m.modules()] == mode
        assert all(parameter.grad is None for parameter in m.parameters())
        assert [layer.calls for layer in m.layers] == [0, 0]
    assert torch.equal(torch.get_rng_state(), generator)


def test_public_verify() -> None:
    original, model = pair()
    assert all(check.passed for check in ac.verify(original, model, example()))
    hook(model.layers[0].f, lambda m, out: out * 1.01)
    assert {check.name for check in ac.verify(original, model, example()) if not check.passed} == {
        FORWARD,
        SECOND,
        EVAL,
        TRAINING,
    }
    with pytest.raises(InputError, match="has no 'attnres'"):
        ac.verify(original, original, example())


def test_transform_refuses_and_leaves_the_model() -> None:
    class Odd(Net):
        """Whether there is a stream is seen by the model, which then computes something else."""

        def middle(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                if type(x) is not Tensor and not torch.compiler.is_exporting():
                    x = x * 2
            return x

    model = Odd()
    keys, hooks = list(model.state_dict()), len(model.layers[0]._forward_pre_hooks)
    with pytest.raises(VerificationError, match=rf"Odd does not compute the same .*{FORWARD}: .* left as it was"):
        ac.transform(model, example(), inplace=True)
    assert (list(model.state_dict()), len(model.layers[0]._forward_pre_hooks)) == (keys, hooks)
    assert not hasattr(model, "attnres_report")


def test_a_read_that_is_changed_in_place_is_named() -> None:
    class Half(Pair):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.f(x)
            x[..., :2].relu_()
            return x + self.g(x)

    with pytest.raises(RefusedError, match=r"changed in place \(what was read at .*test_verification\.py:\d+\)"):
        ac.transform(Net(Block(), Half()), example())


def test_failures_are_listed() -> None:
    checks = [Check("first", 0.5, 0.1), Check("second", 0.0, 0.1), Check("third", 2.0, 0.0)]
    with pytest.raises(VerificationError) as caught:
        raise_failures(checks, "Model")
    assert isinstance(caught.value, RefusedError)
    text = str(caught.value)
    assert "first: 5.0e-01 (allowed 1e-01)" in text
    assert "third: 2.0e+00 (allowed 0e+00)" in text
    assert "second" not in text
    raise_failures([checks[1]], "Model")


ONE, NAN, INF = torch.ones(2), torch.tensor([1.0, float("nan")]), torch.tensor([1.0, -float("inf")])


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([ONE], [ONE], 0.0),
        ([], [], 0.0),
        ([torch.zeros(0)], [torch.zeros(0)], 0.0),
        ([ONE * 1.5], [ONE], 0.5),
        ([ONE * 0.5, ONE * 2], [ONE, ONE * 4], 0.5),
        # relative to the largest magnitude, not element by element
        ([torch.tensor([100.0, 2.0])], [torch.tensor([100.0, 1.0])], 0.01),
        ([ONE], [torch.zeros(2)], 1.0),
        ([ONE], [ONE, ONE], float("inf")),
        ([ONE], [torch.ones(2, 1)], float("inf")),
        ([NAN], [ONE], float("inf")),
        ([NAN, ONE], [ONE, ONE], float("inf")),
        ([ONE, NAN], [ONE, ONE], float("inf")),
        ([INF], [INF], 0.0),
        ([ONE], [INF], float("inf")),
        ([INF], [ONE], float("inf")),
    ],
)
def test_relative_error(actual: list[Tensor], expected: list[Tensor], error: float) -> None:
    assert relative_error(actual, expected) == pytest.approx(error)


def test_relative_error_beside_equal_infinities() -> None:
    """Logits that the model masks."""
    assert relative_error([INF * 1.5], [INF]) == pytest.approx(0.5)


def test_relative_error_takes_outputs_with_a_graph() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert relative_error([parameter * 2], [parameter * 1]) == 1.0


def test_tensors_of_an_output() -> None:
    a, b = torch.ones(1), torch.ones(2)
    found = tensors({"x": a, "n": (None, [b, 3], torch.arange(2)), "s": "text"})
    assert [id(tensor) for tensor in found] == [id(a), id(b)]
