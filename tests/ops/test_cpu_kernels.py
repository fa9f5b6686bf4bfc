"""The C++ kernels compute what `factored` does in fp64, are built on demand, and never get in the way."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnres_compile.ops import cpu, factored
from attnres_compile.ops.cpu import build
from attnres_compile.ops.cpu.calls import Rows
from tests.tolerances import assert_close

F32, F64 = torch.float32, torch.float64
DTYPES = list(build.STORAGE_TYPES)
# What these tests are about is the same without optimisation.
QUICK = {"CXXFLAGS": "-O0"}


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test calls has to be the kernels."""
    if not cpu.available():
        pytest.skip(cpu.reason())
    monkeypatch.setattr(cpu, "factored", None)


class Case:
    """Random numbers for all functions: n sources, S reads of them, a norm, and gradients of every result."""

    def __init__(
        self,
        n: int = 5,
        d: int = 48,
        reads: int = 3,
        *,
        dtype: torch.dtype = F32,
        leading: tuple[int, ...] = (2, 3),
        layout: str = "contiguous",
        magnitudes: Sequence[float] = (1.0,),
        with_norm: bool = True,
    ) -> None:
        generator = torch.Generator().manual_seed(1000 * n + d)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=F64).to(dtype)

        def rows() -> Tensor:
            return LAYOUTS[layout](normal, leading, d)

        computed = factored.compute_dtype(dtype)
        # One feature that is all of its root mean square has the key 1 or -1, whose gradient is rounding alone.
        self.eps = 0.1 if d == 1 else 1e-6
        # A norm's gradient does not reach the length of its input but for this.
        self.norm_eps, self.scale = 0.1, 2.0
        self.sources = [rows() * magnitudes[i % len(magnitudes)] for i in range(n)]
        self.keys = 2 * d**-0.5 * normal(reads, d, dtype=computed)
        self.partial, self.branch, self.grad, self.grad_total = rows(), rows(), rows(), rows()
        self.weight = 1 + normal(d) / 4 if with_norm else None
        self.bias = normal(d) if with_norm else None
        self.grad_o = normal(reads, *leading, d, dtype=computed)
        self.grad_m, self.grad_l = (normal(reads, *leading, dtype=computed) for _ in range(2))
        exact = factored.inter_block([x.double() for x in self.sources], self.keys.double(), self.eps)
        self.o, self.m, self.l = (x[0].to(computed) for x in exact)

    def double(self) -> "Case":
        """The same numbers in fp64."""
        copy = object.__new__(Case)
        for name, value in vars(self).items():
            double = value.double() if isinstance(value, Tensor) else value
            setattr(copy, name, [x.double() for x in value] if isinstance(value, list) else double)
        return copy

    def depth_attention(self, ops: Any) -> Any:
        return ops.depth_attention(self.sources, self.keys[0], self.eps, self.scale)

    def depth_attention_backward(self, ops: Any) -> Any:
        return ops.depth_attention_backward(self.grad, self.sources, self.keys[0], self.eps, self.scale)

    def inter_block(self, ops: Any) -> Any:
        return ops.inter_block(self.sources, self.keys, self.eps)

    def inter_block_backward(self, ops: Any) -> Any:
        grads = self.grad_o, self.grad_m, self.grad_l
        return ops.inter_block_backward(*grads, self.sources, self.keys, self.eps)

    def merge(self, ops: Any) -> Any:
        return ops.merge(self.o, self.m, self.l, self.partial, self.keys[0], self.eps, self.scale)

    def merge_backward(self, ops: Any) -> Any:
        statistics = self.o, self.m, self.l
        return ops.merge_backward(self.grad, *statistics, self.partial, self.keys[0], self.eps, self.scale)

    def add_merge_norm(self, ops: Any, centred: bool = False) -> Any:
        read = self.o, self.m, self.l, self.keys[0]
        numbers = self.eps, self.norm_eps, self.scale, centred
        return ops.add_merge_norm(self.partial, self.branch, *read, self.weight, self.bias, *numbers)

    def add_merge_norm_backward(self, ops: Any, centred: bool = False) -> Any:
        read = self.o, self.m, self.l, self.keys[0]
        numbers = self.eps, self.norm_eps, self.scale, centred
        return ops.add_merge_norm_backward(self.grad_total, self.grad, self.partial, *read, self.weight, *numbers)

    def add_layer_norm(self, ops: Any) -> Any:
        return self.add_merge_norm(ops, centred=True)

    def add_layer_norm_backward(self, ops: Any) -> Any:
        return self.add_merge_norm_backward(ops, centred=True)


READS = ["depth_attention", "depth_attention_backward", "inter_block", "inter_block_backward"]
MERGES = ["merge", "merge_backward", "add_merge_norm", "add_merge_norm_backward"]
LAYER_NORMS = ["add_layer_norm", "add_layer_norm_backward"]
ALL = [*READS, *MERGES, *LAYER_NORMS]


def flat(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [x for result in results for x in flat(result)]


def check(case: Case, names: Sequence[str] = ALL) -> None:
    """The kernels against `factored` in fp64, and their dtypes and shapes against `factored` as it is."""
    exact = case.double()
    for name in names:
        actual, plain = (flat(getattr(case, name)(ops)) for ops in (cpu, factored))
        for index, (a, p, e) in enumerate(zip(actual, plain, flat(getattr(exact, name)(factored)), strict=True)):
            assert a.dtype == p.dtype and a.is_contiguous(), f"{name} {index}"
            assert_close(a, e, f"{name} {index}")


Normal = Callable[..., Tensor]


def contiguous(normal: Normal, leading: tuple[int, ...], d: int) -> Tensor:
    return normal(*leading, d)


def padded_rows(normal: Normal, leading: tuple[int, ...], d: int) -> Tensor:
    return normal(*leading, d + 16)[..., 3 : d + 3]


def expanded_tokens(normal: Normal, leading: tuple[int, ...], d: int) -> Tensor:
    return normal(d).expand(*leading, d)


def batch_transposed(normal: Normal, leading: tuple[int, ...], d: int) -> Tensor:
    return normal(*reversed(leading), d).permute(*reversed(range(len(leading))), len(leading))


def feature_strided(normal: Normal, leading: tuple[int, ...], d: int) -> Tensor:
    return normal(*leading[:-1], d, *leading[-1:]).transpose(-1, -2)


LAYOUTS = {f.__name__: f for f in (contiguous, padded_rows, expanded_tokens, batch_transposed, feature_strided)}


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("d", [7, 48, 257, 1024])
@pytest.mark.parametrize("n", [1, 2, 9, 33, 257])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reads(dtype: torch.dtype, n: int, d: int) -> None:
    for reads in (1, 4, 7) if n == 9 else (2,):
        check(Case(n, d, reads, dtype=dtype), READS)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("d", [7, 48, 257, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merges(dtype: torch.dtype, d: int, with_norm: bool) -> None:
    check(Case(2, d, 1, dtype=dtype, with_norm=with_norm), [*MERGES, *LAYER_NORMS])


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("dtype", [F32, F64])
def test_one_feature(dtype: torch.dtype) -> None:
    check(Case(3, 1, 2, dtype=dtype), [*READS, *MERGES])


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    check(Case(4, 40, 2, dtype=dtype, layout=layout, leading=(2, 3, 4)))


def test_rows_at_one_distance_are_not_copied() -> None:
    for layout, stride in (("contiguous", 40), ("padded_rows", 56), ("expanded_tokens", 0)):
        x = LAYOUTS[layout](torch.randn, (2, 3, 4), 40)
        rows = Rows(x)
        assert (rows.address, rows.stride) == (x.data_ptr(), stride)
    copied = Rows(x := batch_transposed(torch.randn, (2, 3, 4), 40))
    assert copied.stride == 40 and torch.equal(copied.tensor, x)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("leading", [(), (1,), (0,), (2, 0), (2, 3, 4), (700,)])
def test_leading_shapes(leading: tuple[int, ...]) -> None:
    check(Case(3, 64, 2, leading=leading))


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_that_go_past_the_cache(dtype: torch.dtype) -> None:
    check(Case(2, 1024, 4, dtype=dtype, leading=(600,)))


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("d", [48, 1024])
@pytest.mark.parametrize("magnitudes", [(1e18,), (1e-18,), (1e18, 1.0, 1e-18), (0.0, 1.0)])
def test_magnitudes(magnitudes: tuple[float, ...], d: int) -> None:
    check(Case(6, d, magnitudes=magnitudes), ["depth_attention", "inter_block"])
    if len(magnitudes) == 1:
        check(Case(6, d, magnitudes=magnitudes), READS)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
def test_nan_reaches_its_token_only(dtype: torch.dtype, name: str) -> None:
    case = Case(4, 48, 2, dtype=dtype, leading=(6,))
    clean = flat(getattr(case, name)(cpu))
    case.sources[1][2, 5] = case.partial[2, 5] = float("nan")
    touched = torch.arange(6) == 2
    for before, after in zip(clean, flat(getattr(case, name)(cpu)), strict=True):
        axis = next((axis for axis, size in enumerate(before.shape) if size == 6), None)
        if axis is None:  # gradients of parameters
            continue
        before, after = before.movedim(axis, 0), after.movedim(axis, 0)
        assert after[touched].isnan().any(), "the NaN was lost"
        assert torch.equal(after[~touched], before[~touched])


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 65520.0, 6e-8, 1e-45, 1e30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_conversions_are_those_of_torch(dtype: torch.dtype, value: float) -> None:
    x = torch.tensor([value, -value, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 3.0]).to(dtype)
    zero = torch.zeros(1, 7, dtype=dtype)
    read = torch.zeros(1, 7), torch.zeros(1), torch.zeros(1), torch.zeros(7)
    o, m, l, key = (t.to(factored.compute_dtype(dtype)) for t in read)
    total, _ = cpu.add_merge_norm(x[None], zero, o, m, l, key, None, None, 1.0, 1.0, 1.0, False)
    assert torch.equal(total.nan_to_num(7.0), (x[None] + zero).nan_to_num(7.0))
    assert torch.equal(total.isnan(), x[None].isnan())


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("name", ALL)
def test_the_number_of_threads_changes_no_token(name: str) -> None:
    case = Case(3, 256, 2, leading=(200,))
    threads = torch.get_num_threads()
    results: list[list[Tensor]] = []
    try:
        for count in (1, 3, 3):
            torch.set_num_threads(count)
            results.append(flat(getattr(case, name)(cpu)))
    finally:
        torch.set_num_threads(threads)
    one, three, again = results
    assert all(torch.equal(a, b) for a, b in zip(three, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True) if 200 in a.shape)


class Subclass(Tensor):
    """A tensor whose numbers a kernel may not just take."""


@pytest.mark.parametrize("name", ALL)
def test_what_the_kernels_do_not_take_goes_to_factored(name: str) -> None:
    case, mixed = Case(3, 16, 2), Case(3, 16, 2)
    case.sources = [x.as_subclass(Subclass) for x in case.sources]
    case.partial, case.branch = (x.as_subclass(Subclass) for x in (case.partial, case.branch))
    mixed.sources[1], mixed.partial = mixed.sources[1].double(), mixed.partial.double()
    for given in (case, mixed):
        run = getattr(given, name)
        assert all(torch.equal(a, e) for a, e in zip(flat(run(cpu)), flat(run(factored)), strict=True))


def test_meta_tensors_keep_their_device() -> None:
    x, key = torch.empty(3, 4, device="meta"), torch.empty(4, device="meta")
    assert cpu.depth_attention([x, x], key, 1e-6, 1.0).device.type == "meta"


needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "c++", "clang++")), reason="needs a C++ compiler"
)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A build with an empty cache folder, and none of this process's libraries in use."""
    monkeypatch.delenv(build.SWITCH, raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXXFLAGS", QUICK["CXXFLAGS"])
    build.forget()
    yield monkeypatch
    monkeypatch.undo()
    build.forget()


@needs_compiler
def test_builds_into_the_cache_once(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cpu.available() and not cpu.reason()
    check(Case(), READS)
    (library,) = tmp_path.glob("cache/attnres_compile/*/kernels.so")
    built = library.stat().st_mtime_ns
    build.forget()
    assert cpu.available()
    assert library.stat().st_mtime_ns == built


@needs_compiler
def test_builds_where_the_cache_cannot_be_written(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    assert cpu.available() and not cpu.reason()
    check(Case(), READS)


def test_no_compiler(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.setenv("PATH", str(tmp_path))
    assert not cpu.available()
    assert cpu.reason() == "no C++ compiler: set CXX or install g++"
    check(Case())


def test_a_compiler_that_is_not_there(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("CXX", "no-such-compiler -m64")
    assert not cpu.available()
    assert "no-such-compiler" in cpu.reason() and "install g++" in cpu.reason()
    check(Case(), READS)


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
def test_a_compiler_that_fails(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "fatal error: no headers" >&2\nexit 1\n')
    compiler.chmod(0o755)
    fresh.setenv("CXX", str(compiler))
    assert not cpu.available()
    assert "fatal error: no headers" in cpu.reason()
    check(Case(), READS)


def test_can_be_turned_off(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.setenv(build.SWITCH, "0")
    assert not cpu.available()
    assert cpu.reason() == "turned off by ATTNRES_COMPILE_CPU_KERNELS=0"
    check(Case())
    assert not (tmp_path / "cache").exists()


def run_silently(program: str, tmp_path: Path, **environment: str) -> None:
    """Run a program, which must not print anything."""
    variables = {**os.environ, **QUICK, build.SWITCH: "1", "XDG_CACHE_HOME": str(tmp_path / "cache"), **environment}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env=variables, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


READ = """
import torch
from attnres_compile.ops import cpu
def read():
    return cpu.depth_attention([torch.ones(64, 512)] * 4, torch.ones(512), 1e-6, 1.0)
"""


def test_import_builds_nothing(tmp_path: Path) -> None:
    run_silently("import attnres_compile.ops.cpu", tmp_path)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("environment", [{}, {"CXX": "false"}, {"CXX": ""}, {build.SWITCH: "0"}])
def test_nothing_is_printed(environment: dict[str, str], tmp_path: Path) -> None:
    run_silently(f"{READ}\nassert torch.equal(read(), torch.ones(64, 512))", tmp_path, **environment)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_works_after_a_fork(tmp_path: Path) -> None:
    program = """
import os, warnings
warnings.simplefilter("ignore")
torch.set_num_threads(2)
expected = read()
child = os.fork()
if not child:
    os._exit(0 if torch.equal(read(), expected) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    run_silently(READ + program, tmp_path)
