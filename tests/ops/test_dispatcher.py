"""On the CPU the operators are called without Python, and go back to it for what the kernels do not take."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attnres_compile.ops import _library, cpu, factored
from attnres_compile.ops.cpu import build, dispatcher
from tests.tolerances import assert_close

OPS = torch.ops.attnres_compile
D, EPS, NORM_EPS, SCALE = 40, 1e-6, 1e-5, 3.0
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"CPU kernels: {cpu.reason()}")


class Case:
    """Arguments of every operator: three sources of `[2, 5, d]`, two reads, one norm."""

    def __init__(self, dtype: torch.dtype = torch.float32, leading: tuple[int, ...] = (2, 5)) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        wide = factored.compute_dtype(dtype)
        self.sources = [normal(*leading, D) for _ in range(3)]
        self.queries, self.key_norms = normal(2, D), 1 + normal(2, D) / 4
        self.weight, self.bias = 1 + normal(D) / 4, normal(D)
        self.o, self.m = normal(2, *leading, D, dtype=wide), normal(2, *leading, dtype=wide)
        self.l = 1 + normal(2, *leading, dtype=wide).abs()

    def calls(self) -> dict[str, tuple[Any, ...]]:
        """The arguments of each operator."""
        x, statistics = self.sources, (self.o[0], self.m[0], self.l[0])
        read, reads = (self.queries[0], self.key_norms[0]), (self.queries, self.key_norms)
        norm = (EPS, NORM_EPS, SCALE, "layer")
        merged = (*statistics, x[0], *read)
        return {
            "depth_attention": (x, *read, EPS, SCALE),
            "depth_attention_backward": (x[1], x, *read, EPS, SCALE),
            "inter_block": (x, *reads, EPS),
            "inter_block_backward": (self.o, self.m, self.l, x, *reads, EPS),
            "merge": (*merged, EPS, SCALE),
            "merge_backward": (x[1], *merged, EPS, SCALE),
            "merge_norm": (x, *merged, self.weight, self.bias, *norm),
            "add_merge_norm": (x[0], x[1], x, *statistics, *read, self.weight, self.bias, *norm),
            "add_merge_norm_backward": (x[2], x[1], x[0], *statistics, *read, self.weight, *norm),
        }


def in_python(name: str, *args: Any) -> Any:
    """The operator by the kernels of plain PyTorch, in fp64."""

    def double(value: Any) -> Any:
        if isinstance(value, list):
            return [double(item) for item in value]
        return value.double() if isinstance(value, Tensor) else value

    operator = getattr(OPS, name).default
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_library, "cpu", factored)
        return _library.IMPLEMENTATIONS[operator](*map(double, args))


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [tensor for item in value for tensor in flat(item)]


NAMES = list(Case().calls())


@pytest.fixture
def no_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing may come back to Python."""
    for dtype in FLOATS:
        assert build.load(dtype) is not None
    assert dispatcher.loaded is not None

    def refused(*_: Any) -> Any:
        raise AssertionError("the call came to Python")

    monkeypatch.setattr(cpu.calls, "library_for", refused)
    monkeypatch.setattr(cpu.calls, "library_for_merge", refused)
    yield


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.usefixtures("no_python")
def test_equals_plain_pytorch(name: str, dtype: torch.dtype) -> None:
    arguments = Case(dtype).calls()[name]
    found = flat(getattr(OPS, name)(*arguments))
    expected = flat(in_python(name, *arguments))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs.to(ours.dtype), name)


@pytest.mark.parametrize("partial", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.usefixtures("no_python")
def test_reads_without_an_add(dtype: torch.dtype, norm: str, partial: bool) -> None:
    case = Case(dtype)
    given = (case.o[0], case.m[0], case.l[0], case.sources[0] if partial else None, case.queries[0], None)
    for vectors in ((None, None), (case.weight, None), (case.weight, case.bias)):
        arguments = (case.sources, *given, *vectors, EPS, NORM_EPS, SCALE, norm)
        found = OPS.merge_norm(*arguments)
        assert found.dtype == dtype
        assert_close(found, in_python("merge_norm", *arguments).to(dtype), norm)


@pytest.mark.parametrize("leading", [(), (1,), (0,), (3, 0), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("no_python")
def test_any_number_of_axes(name: str, leading: tuple[int, ...]) -> None:
    arguments = Case(leading=leading).calls()[name]
    for ours, theirs in zip(flat(getattr(OPS, name)(*arguments)), flat(in_python(name, *arguments)), strict=True):
        assert ours.shape == theirs.shape
        assert_close(ours, theirs.to(ours.dtype), name)


def rows_apart(x: Tensor) -> Tensor:
    """The same numbers with a gap after each row."""
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


def features_apart(x: Tensor) -> Tensor:
    """The same numbers with a gap after each feature."""
    return torch.stack([x, x], -1)[..., 0]


@pytest.mark.parametrize("layout", [rows_apart, features_apart])
@pytest.mark.parametrize("name", NAMES)
def test_gaps(name: str, layout: Callable[[Tensor], Tensor]) -> None:
    plain = Case()
    expected = flat(getattr(OPS, name)(*plain.calls()[name]))
    plain.sources = [layout(x) for x in plain.sources]
    assert not plain.sources[0].is_contiguous()
    for ours, theirs in zip(flat(getattr(OPS, name)(*plain.calls()[name])), expected, strict=True):
        assert_close(ours, theirs, name)


@pytest.mark.parametrize("name", NAMES)
def test_other_dtypes_go_back_to_python(name: str) -> None:
    """Mixed dtypes are no kernel's: the result is that of plain PyTorch."""
    case = Case()
    case.sources[1] = case.sources[1].double()
    arguments = case.calls()[name]
    expected = flat(_library.IMPLEMENTATIONS[getattr(OPS, name).default](*arguments))
    for ours, theirs in zip(flat(getattr(OPS, name)(*arguments)), expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert_close(ours, theirs, name)


def test_kernels_may_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned off, or not built for a storage type: the call comes back to Python."""
    arguments = Case().calls()["merge"]
    expected = OPS.merge(*arguments)
    came: list[str] = []

    def merge(*args: Any) -> Tensor:
        came.append("merge")
        return factored.merge(*args)

    monkeypatch.setattr(cpu, "merge", merge)
    assert_close(OPS.merge(*arguments), expected)
    assert not came
    dispatcher.install(torch.float32, None)
    try:
        assert_close(OPS.merge(*arguments), expected)
    finally:
        build.forget()
        assert build.load() is not None
    assert came == ["merge"]
