"""`add_merge_norm` is a sum, the reference's merge and torch's norm; its backward keeps none of the results twice."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attnres_compile.ops import add_merge_norm, reference
from tests.ops.test_ops import EPS, F32, F64, HALF, Case, saved_for_backward
from tests.tolerances import assert_close

OPS = torch.ops.attnres_compile
NORM_EPS, SCALE = 1e-3, 3.0


class Fused:
    """Random inputs: two of the case's sources are partial sum and branch, the others finished blocks."""

    def __init__(self, norm: str, dtype: torch.dtype = F32, *, affine: bool = True, **settings: Any) -> None:
        self.norm, case = norm, Case(5, dtype=dtype, reads=2, **settings)
        self.partial, self.branch, *self.blocks = case.sources
        self.query, self.key_norm = case.queries[0], case.norm(0)
        width = self.query.shape[0]
        generator = torch.Generator().manual_seed(width)
        draws = [torch.randn(width, generator=generator, dtype=F64).to(dtype) for _ in range(2)]
        self.weight = 1 + draws[0] / 4 if affine else None
        self.bias = draws[1] if affine else None

    def tensors(self) -> list[Tensor]:
        optional = [t for t in (self.key_norm, self.weight, self.bias) if t is not None]
        return [self.partial, self.branch, *self.blocks, self.query, *optional]

    def leaves(self, dtype: torch.dtype | None = None) -> "Fused":
        """The same numbers, as leaves that require grad."""
        made = object.__new__(Fused)

        def leaf(value: Tensor) -> Tensor:
            return value.detach().to(dtype or value.dtype).requires_grad_()

        for name, value in vars(self).items():
            if isinstance(value, list):
                setattr(made, name, [leaf(item) for item in value])
            else:
                setattr(made, name, leaf(value) if isinstance(value, Tensor) else value)
        return made

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        norms = None if self.key_norm is None else self.key_norm[None]
        o, m, l = OPS.inter_block(self.blocks, self.query[None], norms, EPS)
        return o[0], m[0], l[0]

    def run(self) -> tuple[Tensor, Tensor]:
        options: tuple[Any, ...] = (EPS, NORM_EPS, SCALE, self.norm)
        parameters: tuple[Any, ...] = (self.query, self.key_norm, self.weight, self.bias)
        total, y = add_merge_norm(self.partial, self.branch, self.blocks, *self.statistics(), *parameters, *options)
        return total, y

    def expected(self) -> tuple[Tensor, Tensor]:
        total = self.partial + self.branch
        return total, self.read_and_norm([*self.blocks, total])

    def read_and_norm(self, sources: list[Tensor]) -> Tensor:
        h = reference.depth_attention(sources, self.query, self.key_norm, eps=EPS, scale=SCALE)
        shape = (h.shape[-1],)
        if self.norm == "layer":
            return F.layer_norm(h, shape, self.weight, self.bias, NORM_EPS)
        y = F.rms_norm(h, shape, self.weight, NORM_EPS)
        return y if self.bias is None else y + self.bias


def check(case: Fused) -> None:
    """Results and all gradients against the reference in fp64."""
    exact, case = case.leaves(F64), case.leaves()
    found, expected = case.run(), exact.expected()
    weights = [torch.randn_like(e) for e in expected]
    for name, actual, wanted in zip(("total", "normalised"), found, expected, strict=True):
        assert actual.dtype == case.partial.dtype
        assert_close(actual, wanted, name)
    actual_grads = torch.autograd.grad(
        found, case.tensors(), [w.to(f.dtype) for w, f in zip(weights, found, strict=True)]
    )
    expected_grads = torch.autograd.grad(expected, exact.tensors(), weights)
    for index, (a, e) in enumerate(zip(actual_grads, expected_grads, strict=True)):
        assert a.dtype == case.tensors()[index].dtype
        assert_close(a, e, f"gradient {index}")


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", [F64, F32, *HALF])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_equals_the_reference(norm: str, dtype: torch.dtype, affine: bool) -> None:
    torch.manual_seed(0)
    check(Fused(norm, dtype, affine=affine, with_norm=affine))


@pytest.mark.parametrize("layout", ["padded_rows", "feature_strided", "batch_transposed"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_strides(norm: str, layout: str) -> None:
    torch.manual_seed(0)
    check(Fused(norm, F64, leading=(2, 3, 4), width=40, layout=layout))


@pytest.mark.parametrize("leading", [(), (3,), (2, 0)])
def test_shapes(leading: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    check(Fused("rms", F64, leading=leading, width=7))


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_gradcheck(norm: str) -> None:
    case = Fused(norm, F64, leading=(2,), width=5).leaves()

    def flat(*_: Tensor) -> tuple[Tensor, Tensor]:
        return case.run()

    assert torch.autograd.gradcheck(flat, case.tensors())


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_opcheck(norm: str) -> None:
    case = Fused(norm, leading=(2, 3), width=7).leaves()
    statistics = [x.detach() for x in case.statistics()]
    args = (case.partial, case.branch, [b.detach() for b in case.blocks], *statistics, case.query, case.key_norm)
    torch.library.opcheck(OPS.add_merge_norm.default, (*args, case.weight, case.bias, EPS, NORM_EPS, SCALE, norm))


def test_the_sum_alone_is_kept() -> None:
    """Neither the read nor the normalised input of the norm, nor phase 1's sum."""
    case = Fused("rms", leading=(5, 8)).leaves()
    statistics = case.statistics()
    options: tuple[Any, ...] = (EPS, NORM_EPS, SCALE, "rms")
    with saved_for_backward() as kept:
        parameters: tuple[Any, ...] = (case.query, case.key_norm, case.weight, case.bias)
        total, _ = add_merge_norm(case.partial, case.branch, case.blocks, *statistics, *parameters, *options)
    full = {t.untyped_storage().data_ptr() for t in kept if t.dim() > 1 and t.shape[-1] == 48}
    assert full == {t.untyped_storage().data_ptr() for t in (total, *case.blocks)}


def test_no_second_derivative() -> None:
    case = Fused("rms").leaves()
    total, y = case.run()
    (grad,) = torch.autograd.grad(y.square().sum() + total.sum(), [case.partial], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        grad.sum().backward()
