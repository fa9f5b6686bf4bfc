"""Operation names of every front end, additions, and the axis that carried operations leave the features on."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attnres_compile.arithmetic import (
    CASTS,
    INDEXING,
    METADATA,
    PERMUTATIONS,
    ROW_MAJOR,
    SCALINGS,
    UNCHANGED,
    as_addition,
    carried_axis,
    operation_name,
    permutation,
    scaling_factor,
)

aten = torch.ops.aten
WIDTH = 6


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("add", [aten.add.Tensor, aten.add.Scalar, torch.add, operator.add, Tensor.add, Tensor.__add__, "add"]),
        ("add_", [aten.add_.Tensor, operator.iadd, Tensor.add_, Tensor.__iadd__, "add_", "__iadd__"]),
        ("radd", [Tensor.__radd__, "__radd__"]),
        ("sub", [aten.sub.Tensor, torch.sub, torch.subtract, operator.sub, Tensor.__sub__, "subtract"]),
        ("sub_", [aten.sub_.Tensor, operator.isub, Tensor.sub_]),
        ("rsub", [aten.rsub.Scalar, Tensor.__rsub__]),
        ("mul", [aten.mul.Tensor, torch.mul, torch.multiply, operator.mul, Tensor.__mul__]),
        ("rmul", [Tensor.__rmul__]),
        ("mul_", [aten.mul_.Tensor, operator.imul, Tensor.mul_]),
        ("div", [aten.div.Tensor, torch.div, torch.true_divide, operator.truediv, Tensor.__truediv__]),
        ("div_", [aten.div_.Tensor, operator.itruediv]),
        ("neg", [aten.neg.default, torch.neg, torch.negative, operator.neg, Tensor.__neg__]),
        ("getitem", [operator.getitem, Tensor.__getitem__, "__getitem__"]),
        ("setitem", [operator.setitem, Tensor.__setitem__]),
        ("dropout", [aten.dropout.default, F.dropout, torch.dropout]),
        ("layer_norm", [aten.layer_norm.default, F.layer_norm, torch.layer_norm]),
        ("linear", [aten.linear.default, F.linear, torch._C._nn.linear]),
        ("to", [aten.to.dtype, Tensor.to, "to"]),
        ("getattr", [getattr]),
        ("relu", [aten.relu.default, F.relu, torch.relu, Tensor.relu]),
    ],
)
def test_one_name_per_operation(name: str, targets: list[Any]) -> None:
    assert {operation_name(target) for target in targets} == {name}


X, F1, G1, A = object(), object(), object(), 0.5


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "expected"),
    [
        ("add", (X, F1), {}, (X, F1, 1, False, True)),
        ("add", (X, F1), {"alpha": A}, (X, F1, A, False, False)),
        ("add", (X, F1, A), {}, (X, F1, A, False, False)),
        ("add", (X,), {"other": F1}, (X, F1, 1, False, True)),
        ("add", (), {"input": X, "other": F1}, (X, F1, 1, False, True)),
        ("radd", (X, 3), {}, (X, 3, 1, False, True)),
        ("add_", (X, F1), {}, (X, F1, 1, True, False)),
        ("sub", (X, F1), {}, (X, F1, -1, False, False)),
        ("sub", (X, F1), {"alpha": 2}, (X, F1, -2, False, False)),
        ("sub_", (X, F1), {}, (X, F1, -1, True, False)),
        ("addcmul", (X, F1, G1), {}, (X, (F1, G1), 1, False, False)),
        ("addcmul", (X, F1, G1), {"value": A}, (X, (F1, G1), A, False, False)),
        ("addcmul_", (X, F1, G1), {}, (X, (F1, G1), 1, True, False)),
        ("addcdiv", (X, F1, G1), {}, (X, (F1, G1), 1, False, False)),
        ("addmm", (X, F1, G1), {"alpha": A}, (X, (F1, G1), A, False, False)),
        ("addmm", (X, F1, G1), {"beta": 1}, (X, (F1, G1), 1, False, False)),
        ("baddbmm", (X, F1, G1), {}, (X, (F1, G1), 1, False, False)),
    ],
)
def test_additions(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], expected: tuple[Any, ...]) -> None:
    found = as_addition(name, args, kwargs)
    assert found is not None
    assert (found.skip, found.branch, found.factor, found.in_place, found.commutes) == expected


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("add", (X,), {}),
        ("rsub", (X, 1), {}),
        ("mul", (X, F1), {}),
        ("addmm", (X, F1, G1), {"beta": 0.5}),
        ("addmm", (X, F1), {}),
        ("index_add", (X, 0, F1, G1), {}),
        ("logaddexp", (X, F1), {}),
        ("lerp", (X, F1, 0.3), {}),
    ],
)
def test_no_additions(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert as_addition(name, args, kwargs) is None


@pytest.mark.parametrize("factor", [1, -1, 0.25, torch.tensor(2.0)])
@pytest.mark.parametrize("name", ["add", "sub", "addcmul", "addcdiv", "addmm"])
def test_value_that_an_addition_pushes(name: str, factor: Any) -> None:
    x, f, g = (torch.rand(3, 3, generator=torch.Generator().manual_seed(i)) + 0.5 for i in range(3))
    key = {"addcmul": "value", "addcdiv": "value"}.get(name, "alpha")
    args = (x, f, g) if name.startswith("addc") or name == "addmm" else (x, f)
    addition = as_addition(name, args, {key: factor})
    assert addition is not None
    value = addition.branch_value(lambda target, *a: target(*a))
    plain = getattr(torch, name)(*args, **{key: float(factor)})
    torch.testing.assert_close(x + value, plain)


def test_value_of_a_number() -> None:
    for name, value, expected in (("add", 3, 3), ("sub", 3, -3), ("radd", 0.5, 0.5)):
        addition = as_addition(name, (X, value), {})
        assert addition is not None
        assert addition.branch_value(lambda target, *a: pytest.fail("a number needs no operator")) == expected


Call = tuple[str, Callable[..., Any], tuple[Any, ...]]
LAST: list[tuple[Call, int | None]] = [
    (("clone", Tensor.clone, ()), -1),
    (("to", Tensor.to, (torch.float64,)), -1),
    (("mul", Tensor.mul, (2,)), -1),
    (("dropout", F.dropout, (0.5, False)), -1),
    (("view", Tensor.view, (8, WIDTH)), -1),
    (("view", Tensor.view, (2, 2, 2, WIDTH)), -1),
    (("view", Tensor.view, (2, 4, 2, 3)), None),
    (("flatten", Tensor.flatten, (0, 1)), -1),
    (("flatten", Tensor.flatten, (1, 2)), None),
    (("unsqueeze", Tensor.unsqueeze, (0,)), -1),
    (("unsqueeze", Tensor.unsqueeze, (-1,)), None),
    (("select", Tensor.select, (1, 0)), -1),
    (("select", Tensor.select, (-1, 0)), None),
    (("select", Tensor.select, (2, 0)), None),
    (("narrow", Tensor.narrow, (1, 0, 2)), -1),
    (("narrow", Tensor.narrow, (2, 0, 2)), None),
    (("slice", aten.slice.Tensor, (1, 0, 2)), -1),
    (("slice", aten.slice.Tensor, (2, 0, 2)), None),
    (("slice", aten.slice.Tensor, (2, 0, 9223372036854775807)), -1),
    (("index_select", Tensor.index_select, (1, torch.tensor([1, 0]))), -1),
    (("index_select", Tensor.index_select, (2, torch.arange(WIDTH))), None),
    (("expand", Tensor.expand, (3, 2, 4, WIDTH)), -1),
    (("index", aten.index.Tensor, ([None, torch.tensor([1, 0])],)), -1),
    (("index", aten.index.Tensor, ([None, None, torch.arange(WIDTH)],)), None),
    (("getitem", Tensor.__getitem__, ((slice(None), 0),)), -1),
    (("getitem", Tensor.__getitem__, (0,)), -1),
    (("getitem", Tensor.__getitem__, ((slice(None), slice(None), slice(None)),)), -1),
    (("getitem", Tensor.__getitem__, ((Ellipsis, slice(0, 2)),)), None),
    (("getitem", Tensor.__getitem__, ((slice(None), None),)), -1),
    (("getitem", Tensor.__getitem__, ((0, 0, 0),)), None),
    (("getitem", Tensor.__getitem__, ((slice(None), Ellipsis),)), -1),
    (("transpose", Tensor.transpose, (0, 1)), -1),
    (("transpose", Tensor.transpose, (1, 2)), -2),
    (("transpose", Tensor.transpose, (0, -1)), -3),
    (("swapaxes", Tensor.swapaxes, (-1, 1)), -2),
    (("permute", Tensor.permute, (2, 0, 1)), -3),
    (("permute", Tensor.permute, ((0, 2, 1),)), -2),
    (("movedim", Tensor.movedim, (2, 0)), -3),
    (("movedim", Tensor.movedim, (0, 1)), -1),
    (("tanh", Tensor.tanh, ()), None),
    (("softmax", Tensor.softmax, (-1,)), None),
    (("flip", Tensor.flip, (1,)), None),
    (("roll", Tensor.roll, (1, 1)), None),
]


@pytest.mark.parametrize(("call", "expected"), LAST, ids=lambda value: value[0] if isinstance(value, tuple) else None)
def test_features_last(call: Call, expected: int | None) -> None:
    name, target, rest = call
    x = torch.zeros(2, 4, WIDTH)
    after = target(x, *rest)
    assert carried_axis(name, (x, *rest), x.shape, after.shape, -1) == expected


@pytest.mark.parametrize(
    ("name", "target", "rest", "expected"),
    [
        ("transpose", Tensor.transpose, (1, 2), -1),
        ("transpose", Tensor.transpose, (0, 2), -2),
        ("permute", Tensor.permute, (1, 0, 2), -3),
        ("movedim", Tensor.movedim, (1, -1), -1),
        ("contiguous", Tensor.contiguous, (), -2),
        ("div", Tensor.div, (2,), -2),
        ("view", Tensor.view, (2, WIDTH, 4), -2),
        ("view", Tensor.view, (2, WIDTH, 2, 2), -3),
        ("view", Tensor.view, (1, 2, WIDTH, 2, 2), -3),
        ("view", Tensor.view, (2, 2, WIDTH // 2, 4), None),
        ("flatten", Tensor.flatten, (0, 1), None),
        ("flatten", Tensor.flatten, (1, 2), None),
        ("select", Tensor.select, (2, 0), None),
        ("getitem", Tensor.__getitem__, ((slice(None), slice(None), slice(0, 2)),), None),
        ("unsqueeze", Tensor.unsqueeze, (0,), -2),
        ("unsqueeze", Tensor.unsqueeze, (3,), -3),
    ],
)
def test_features_second_of_three(
    name: str, target: Callable[..., Tensor], rest: tuple[Any, ...], expected: int | None
) -> None:
    x = torch.zeros(2, WIDTH, 4)
    assert carried_axis(name, (x, *rest), x.shape, target(x, *rest).shape, -2) == expected


@pytest.mark.parametrize("name", ["expand", "view", "unsqueeze", "getitem"])
def test_a_number_has_no_features(name: str) -> None:
    assert carried_axis(name, (torch.zeros(()), 1), (), (1,), -1) is None


@pytest.mark.parametrize("mask", [torch.ones(2, dtype=torch.bool), torch.ones(2, 4, dtype=torch.bool)])
def test_boolean_masks_are_not_carried(mask: Tensor) -> None:
    """How many tokens are left depends on the values."""
    x = torch.zeros(2, 4, WIDTH)
    assert carried_axis("getitem", (x, mask), x.shape, x[mask].shape, -1) is None


@pytest.mark.parametrize(
    ("name", "rest", "expected"),
    [
        ("transpose", (0, -1), [3, 1, 2, 0]),
        ("permute", (0, -1, 1, 2), [0, 3, 1, 2]),
        ("permute", ([0, 3, 1, 2],), [0, 3, 1, 2]),
        ("movedim", (-1, 1), [0, 3, 1, 2]),
        ("moveaxis", (0, 2), [1, 2, 0, 3]),
        ("movedim", ((0, 1), (1, 0)), None),
        ("transpose", (0,), None),
    ],
)
def test_permutations(name: str, rest: tuple[Any, ...], expected: list[int] | None) -> None:
    x = torch.zeros(2, 3, 4, 5)
    assert permutation(name, (x, *rest), 4) == expected
    if expected is not None:
        assert getattr(x, name)(*rest).shape == x.permute(expected).shape


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("neg", (X,), -1),
        ("mul", (X, 2), 2),
        ("div", (X, 0.5), 0.5),
        ("mul", (X, torch.zeros(3)), None),
        ("mul", (X, torch.zeros(1, 3)), None),
        ("mul", (X, torch.ones(1, 1, 1, 1)), None),
        ("mul", (X,), None),
        ("div", (X, 2, "floor"), None),
    ],
)
def test_scaling_factors(name: str, args: tuple[Any, ...], expected: Any) -> None:
    assert scaling_factor(name, args, 3) == expected


def test_scaling_by_a_number_in_a_tensor() -> None:
    for shape in ((), (1,), (1, 1, 1)):
        factor = torch.full(shape, 2.0)
        assert scaling_factor("mul", (X, factor), 3) is factor


def test_an_operation_is_of_one_kind() -> None:
    kinds = [UNCHANGED, CASTS, ROW_MAJOR, INDEXING, PERMUTATIONS, SCALINGS, METADATA]
    assert sum(map(len, kinds)) == len(frozenset.union(*kinds))
