"""The operators `torch.ops.attnres_compile.*` compute what the reference says."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks

import attnres_compile.ops
from attnres_compile.ops import reference
from tests.tolerances import assert_close

OPS = torch.ops.attnres_compile
EPS = 1e-6
F32, F64 = torch.float32, torch.float64
HALF = [torch.float16, torch.bfloat16]
Statistics = tuple[Tensor, Tensor, Tensor]


class Case:
    """Random inputs for all three operators: n sources, the last of which is `merge`'s partial sum."""

    def __init__(
        self,
        count: int = 4,
        leading: tuple[int, ...] = (2, 5),
        width: int = 48,
        *,
        dtype: torch.dtype = F32,
        with_norm: bool = True,
        reads: int = 3,
        layout: str = "contiguous",
        grad: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(count * 1000 + width)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=F64).to(dtype)

        self.scale = float(count)
        self.sources = [LAYOUTS[layout](normal, leading, width) for _ in range(count)]
        # Logits with a standard deviation near 2: larger ones saturate the softmax and its gradient cancels.
        self.queries = 2 * width**-0.5 * normal(reads, width)
        self.key_norms = 1 + normal(reads, width) / 4 if with_norm else None
        if grad:
            for tensor in self.tensors():
                tensor.requires_grad_()

    def tensors(self) -> list[Tensor]:
        return [*self.sources, self.queries, *([] if self.key_norms is None else [self.key_norms])]

    def norm(self, row: int) -> Tensor | None:
        return None if self.key_norms is None else self.key_norms[row]

    def double(self) -> "Case":
        """The same numbers in fp64, as leaves of their own."""
        copy = object.__new__(Case)
        copy.scale = self.scale
        copy.sources = [x.detach().double().requires_grad_(x.requires_grad) for x in self.sources]
        copy.queries = self.queries.detach().double().requires_grad_(self.queries.requires_grad)
        norms = self.key_norms
        copy.key_norms = None if norms is None else norms.detach().double().requires_grad_(norms.requires_grad)
        return copy

    def depth_attention(self) -> Tensor:
        out: Tensor = OPS.depth_attention(self.sources, self.queries[0], self.norm(0), EPS, self.scale)
        return out

    def inter_block(self) -> Statistics:
        o, m, l = OPS.inter_block(self.sources, self.queries, self.key_norms, EPS)
        return o, m, l

    def two_phase(self) -> Tensor:
        """Every read of the block by both phases: `[S, ..., d]`."""
        o, m, l = OPS.inter_block(self.sources[:-1], self.queries, self.key_norms, EPS)
        rows = range(len(self.queries))
        return torch.stack(
            [OPS.merge(o[r], m[r], l[r], self.sources[-1], self.queries[r], self.norm(r), EPS, 2.0) for r in rows]
        )

    def expected_depth_attention(self) -> Tensor:
        return reference.depth_attention(self.sources, self.queries[0], self.norm(0), eps=EPS, scale=self.scale)

    def expected_inter_block(self) -> Statistics:
        return reference.inter_block(self.sources, self.queries, self.key_norms, eps=EPS)

    def expected_two_phase(self) -> Tensor:
        rows = range(len(self.queries))
        return torch.stack(
            [reference.depth_attention(self.sources, self.queries[r], self.norm(r), eps=EPS, scale=2.0) for r in rows]
        )


Normal = Callable[..., Tensor]


def contiguous(normal: Normal, leading: tuple[int, ...], width: int) -> Tensor:
    return normal(*leading, width)


def padded_rows(normal: Normal, leading: tuple[int, ...], width: int) -> Tensor:
    return normal(*leading, width + 16)[..., 3 : width + 3]


def feature_strided(normal: Normal, leading: tuple[int, ...], width: int) -> Tensor:
    return normal(*leading[:-1], width, *leading[-1:]).transpose(-1, -2)


def batch_transposed(normal: Normal, leading: tuple[int, ...], width: int) -> Tensor:
    return normal(*reversed(leading), width).permute(*reversed(range(len(leading))), len(leading))


def expanded_tokens(normal: Normal, leading: tuple[int, ...], width: int) -> Tensor:
    return normal(width).expand(*leading, width)


def expanded_features(normal: Normal, leading: tuple[int, ...], width: int) -> Tensor:
    return normal(*leading, 1).expand(*leading, width)


def every_second(normal: Normal, leading: tuple[int, ...], width: int) -> Tensor:
    return normal(*leading, 2 * width)[..., ::2]


LAYOUTS = {
    layout.__name__: layout
    for layout in (
        contiguous,
        padded_rows,
        feature_strided,
        batch_transposed,
        expanded_tokens,
        expanded_features,
        every_second,
    )
}


def check(case: Case) -> None:
    """All operators against the reference in fp64 on the same numbers."""
    exact, dtype = case.double(), case.sources[0].dtype
    h = case.depth_attention()
    assert h.dtype == dtype
    assert_close(h, exact.expected_depth_attention(), "depth_attention")
    statistics = case.inter_block()
    for name, actual, expected in zip("oml", statistics, exact.expected_inter_block(), strict=True):
        assert actual.dtype == torch.promote_types(dtype, F32)
        assert_close(actual, expected, f"inter_block {name}")
    o, m, l = statistics
    alone = OPS.merge(o[0], m[0], l[0], None, case.queries[0], case.norm(0), EPS, case.scale)
    assert alone.dtype == o.dtype
    assert_close(alone, exact.expected_depth_attention(), "merge without partial sum")
    if len(case.sources) > 1:
        h = case.two_phase()
        assert h.dtype == dtype
        assert_close(h, exact.expected_two_phase(), "inter_block and merge")


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 9, 33, 40])
@pytest.mark.parametrize("dtype", [F64, F32, *HALF])
def test_equals_the_reference(dtype: torch.dtype, count: int, with_norm: bool) -> None:
    check(Case(count, dtype=dtype, with_norm=with_norm))


@pytest.mark.parametrize("leading", [(), (3,), (2, 5), (2, 3, 4), (0,), (2, 0)])
@pytest.mark.parametrize("width", [1, 7, 96, 257])
def test_shapes(width: int, leading: tuple[int, ...]) -> None:
    check(Case(3, leading, width))


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str, dtype: torch.dtype) -> None:
    check(Case(5, (2, 3, 4), 40, layout=layout, dtype=dtype))


@pytest.mark.parametrize("magnitudes", [(1e18,), (1e-18,), (1e18, 1.0, 1e-18), (0.0,), (0.0, 1.0)])
def test_magnitudes(magnitudes: tuple[float, ...]) -> None:
    case = Case(6)
    case.sources = [x * magnitudes[i % len(magnitudes)] for i, x in enumerate(case.sources)]
    check(case)


@pytest.mark.parametrize("size", [30.0, 1000.0])
def test_large_logits(size: float) -> None:
    case = Case(6, dtype=F64)
    case.queries *= size
    check(case)


def gradients(loss_of: Tensor | Statistics, case: Case) -> tuple[Tensor, ...]:
    """Gradients of a fixed random projection with respect to all the case's tensors."""
    outputs = (loss_of,) if isinstance(loss_of, Tensor) else loss_of
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(out.shape, generator=generator, dtype=F64).to(out.dtype) for out in outputs]
    return torch.autograd.grad(outputs, case.tensors(), weights)


def check_gradients(case: Case, *, tied: bool = False) -> None:
    """The gradients of all operators against autograd's through the reference in fp64.

    Where logits are `tied` the derivative of their maximum is not unique; that of the two phases together still is.
    """
    exact = case.double()
    pairs: list[tuple[str, Tensor | Statistics, Tensor | Statistics]] = [
        ("depth_attention", case.depth_attention(), exact.expected_depth_attention()),
        ("two phases", case.two_phase(), exact.expected_two_phase()),
    ]
    if not tied:
        pairs.append(("inter_block", case.inter_block(), exact.expected_inter_block()))
    for name, actual, expected in pairs:
        for index, (a, e) in enumerate(zip(gradients(actual, case), gradients(expected, exact), strict=True)):
            assert a.dtype == case.tensors()[index].dtype
            assert_close(a, e, f"{name}, gradient {index}")


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("count", [2, 9, 33])
@pytest.mark.parametrize("dtype", [F64, F32, *HALF])
def test_gradients_equal_the_reference(dtype: torch.dtype, count: int, with_norm: bool) -> None:
    check_gradients(Case(count, dtype=dtype, with_norm=with_norm, grad=True))


@pytest.mark.parametrize("leading", [(), (3,), (2, 3, 4), (2, 0)])
def test_gradient_shapes(leading: tuple[int, ...]) -> None:
    check_gradients(Case(3, leading, 7, grad=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_strides(layout: str) -> None:
    # Features that are all equal have keys +1 or -1.
    case = Case(3, (2, 3, 4), 40, layout=layout, dtype=F64, grad=True)
    check_gradients(case, tied=layout == "expanded_features")


@pytest.mark.parametrize("magnitude", [1e12, 1e18, 1e-18, 0.0])
def test_gradients_of_extreme_sources(magnitude: float) -> None:
    case = Case(4)
    case.sources = [x * magnitude for x in case.sources]
    for tensor in case.tensors():
        tensor.requires_grad_()
    check_gradients(case, tied=magnitude == 0)


def operators(case: Case) -> dict[str, tuple[Any, tuple[object, ...]]]:
    """Each operator with arguments from the case; `merge` with and without a partial sum."""
    o, m, l = (x[0].detach().requires_grad_() for x in case.inter_block())
    query = case.queries[0].detach().requires_grad_()
    norm = None if case.key_norms is None else case.key_norms[0].detach().requires_grad_()
    return {
        "depth_attention": (OPS.depth_attention.default, (case.sources, query, norm, EPS, case.scale)),
        "inter_block": (OPS.inter_block.default, (case.sources, case.queries, case.key_norms, EPS)),
        "merge": (OPS.merge.default, (o, m, l, case.sources[-1], query, norm, EPS, 2.0)),
        "merge_alone": (OPS.merge.default, (o, m, l, None, query, norm, EPS, 2.0)),
    }


@contextmanager
def saved_for_backward() -> Iterator[list[Tensor]]:
    """Collects what autograd keeps meanwhile."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


OPERATORS = ["depth_attention", "inter_block", "merge", "merge_alone"]


def leaves(args: tuple[object, ...]) -> list[Tensor]:
    flat = [x for arg in args for x in (arg if isinstance(arg, list) else [arg])]
    return [x for x in flat if isinstance(x, Tensor)]


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", OPERATORS)
def test_gradcheck(name: str, count: int, with_norm: bool) -> None:
    case = Case(count, (2,), 5, dtype=F64, with_norm=with_norm, reads=2, grad=True)
    op, args = operators(case)[name]
    if name == "merge_alone":
        args = tuple(x.detach() if i >= 3 and isinstance(x, Tensor) else x for i, x in enumerate(args))
    inputs = leaves(args)

    def flat(*tensors: Tensor) -> Tensor | Statistics:
        rest = iter(tensors)
        out: Tensor | Statistics = op(
            *[
                [next(rest) for _ in arg] if isinstance(arg, list) else next(rest) if isinstance(arg, Tensor) else arg
                for arg in args
            ]
        )
        return out

    assert torch.autograd.gradcheck(flat, inputs)


@pytest.mark.parametrize(("with_norm", "layout"), [(False, "contiguous"), (True, "batch_transposed")])
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str, with_norm: bool, layout: str) -> None:
    op, args = operators(Case(3, (2, 3), 7, with_norm=with_norm, layout=layout, grad=True))[name]
    torch.library.opcheck(op, args)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATORS)
def test_backward_keeps_inputs_and_scalars_only(name: str, dtype: torch.dtype) -> None:
    case = Case(4, (5, 8), 48, dtype=dtype, grad=True)
    op, args = operators(case)[name]
    with saved_for_backward() as saved:
        op(*args)
    inputs = {x.untyped_storage().data_ptr() for x in leaves(args)}
    kept = {x.untyped_storage().data_ptr() for x in saved}
    extra = [tuple(x.shape) for x in saved if x.untyped_storage().data_ptr() not in inputs and 48 in x.shape]
    assert not extra, f"full-size tensors kept for the backward: {extra}"
    # Inputs kept in any other way would escape checkpointing and CPU offloading.
    needed = {x.untyped_storage().data_ptr() for x in leaves(args) if x.shape[-1] == 48 and x.dim() > 2}
    assert needed <= kept, "the backward holds tensors that saved_tensors_hooks cannot see"


@pytest.mark.parametrize("name", ["depth_attention", "two_phase"])
@pytest.mark.parametrize("which", [0, 1, 3])
def test_nan_reaches_its_token_only(which: int, name: str) -> None:
    case = Case(4, (6,), 48)
    clean: Tensor = getattr(case, name)()
    case.sources[which][2, 5] = float("nan")
    out: Tensor = getattr(case, name)()
    touched = torch.arange(6) == 2
    assert out[..., touched, :].isnan().all()
    assert torch.equal(out[..., ~touched, :], clean[..., ~touched, :])


@pytest.mark.parametrize("parameters", [F32, torch.bfloat16])
@pytest.mark.parametrize("dtype", HALF)
def test_dtype_follows_the_sources(dtype: torch.dtype, parameters: torch.dtype) -> None:
    case = Case(3, dtype=dtype, grad=True)
    case.queries = case.queries.detach().to(parameters).requires_grad_()
    assert case.key_norms is not None
    case.key_norms = case.key_norms.detach().to(parameters).requires_grad_()
    check(case)
    assert [g.dtype for g in gradients(case.two_phase(), case)] == [x.dtype for x in case.tensors()]


def test_autocast_changes_nothing() -> None:
    case = Case(4, grad=True)
    expected = case.depth_attention(), case.two_phase()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = case.depth_attention(), case.two_phase()
        grads = gradients(actual[1], case)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    assert all(torch.equal(a, e) for a, e in zip(grads, gradients(expected[1], case), strict=True))


def test_compiles_as_one_graph_for_all_shapes() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def both(sources: list[Tensor], queries: Tensor, key_norms: Tensor) -> Tensor:
        eps = 1e-6  # with dynamic=True a global float starts as a symbol, and specialising it traces twice
        o, m, l = OPS.inter_block(sources[:-1], queries, key_norms, eps)
        query, key_norm = queries[0], key_norms[0]
        merged: Tensor = OPS.merge(o[0], m[0], l[0], sources[-1], query, key_norm, eps, 3.0)
        whole: Tensor = OPS.depth_attention(sources, query, key_norm, eps, 3.0)
        return merged + whole.square()

    compiled = torch.compile(both, fullgraph=True, backend=counter, dynamic=True)
    for leading in ((2, 5), (3, 4), (6, 7)):
        case = Case(3, leading, reads=1, grad=True)
        assert case.key_norms is not None
        expected = both(case.sources, case.queries, case.key_norms)
        actual = compiled(case.sources, case.queries, case.key_norms)
        assert_close(actual, expected)
        for a, e in zip(gradients(actual, case), gradients(expected, case), strict=True):
            assert_close(a, e)
    assert counter.frame_count == 1
    names = [str(node.target) for node in counter.graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("attnres_compile" in name for name in names) == 3


def test_wrappers_call_the_operators() -> None:
    case = Case(3)
    ops = attnres_compile.ops
    h = ops.depth_attention(case.sources, case.queries[0], case.norm(0), EPS, case.scale)
    assert torch.equal(h, case.depth_attention())
    o, m, l = ops.inter_block(case.sources[:-1], case.queries, case.key_norms, EPS)
    merged = ops.merge(o[0], m[0], l[0], case.sources[-1], case.queries[0], case.norm(0), EPS, 2.0)
    assert torch.equal(merged, case.two_phase()[0])
