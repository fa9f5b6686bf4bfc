"""`merge_norm` is the reference's read and torch's norm, with and without a partial sum."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attnres_compile.ops import merge_norm
from tests.ops.test_add_merge_norm import NORM_EPS, SCALE, Fused
from tests.ops.test_ops import EPS, F32, F64, HALF, saved_for_backward
from tests.tolerances import assert_close

OPS = torch.ops.attnres_compile


def run(case: Fused, first: bool) -> Tensor:
    parameters: tuple[Any, ...] = (case.query, case.key_norm, case.weight, case.bias, EPS, NORM_EPS, SCALE, case.norm)
    o, m, l = case.statistics()
    return merge_norm(case.blocks, o, m, l, None if first else case.partial, *parameters)


def expected(case: Fused, first: bool) -> Tensor:
    return case.read_and_norm(case.blocks if first else [*case.blocks, case.partial])


def tensors(case: Fused, first: bool) -> list[Tensor]:
    return [t for t in case.tensors() if t is not case.branch and not (first and t is case.partial)]


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("dtype", [F64, F32, *HALF])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_equals_the_reference(norm: str, dtype: torch.dtype, first: bool, affine: bool) -> None:
    torch.manual_seed(0)
    plain = Fused(norm, dtype, affine=affine, with_norm=affine)
    case, exact = plain.leaves(), plain.leaves(F64)
    found, wanted = run(case, first), expected(exact, first)
    assert found.dtype == dtype
    assert_close(found, wanted)
    weights = torch.randn_like(wanted)
    actual_grads = torch.autograd.grad(found, tensors(case, first), weights.to(dtype))
    expected_grads = torch.autograd.grad(wanted, tensors(exact, first), weights)
    for index, (a, e) in enumerate(zip(actual_grads, expected_grads, strict=True)):
        assert a.dtype == dtype
        assert_close(a, e, f"gradient {index}")


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_gradcheck(norm: str, first: bool) -> None:
    case = Fused(norm, F64, leading=(2,), width=5).leaves()
    assert torch.autograd.gradcheck(lambda *_: run(case, first), tensors(case, first))


@pytest.mark.parametrize("first", [False, True])
def test_opcheck(first: bool) -> None:
    case = Fused("layer", leading=(2, 3), width=7).leaves()
    statistics = [x.detach() for x in case.statistics()]
    args = ([b.detach() for b in case.blocks], *statistics, None if first else case.partial)
    options = (case.query, case.key_norm, case.weight, case.bias, EPS, NORM_EPS, SCALE, "layer")
    torch.library.opcheck(OPS.merge_norm.default, (*args, *options))


@pytest.mark.parametrize("first", [False, True])
def test_the_sources_alone_are_kept(first: bool) -> None:
    case = Fused("rms", leading=(5, 8)).leaves()
    with saved_for_backward() as kept:
        run(case, first)
    full = {t.untyped_storage().data_ptr() for t in kept if t.dim() > 1 and t.shape[-1] == 48 and t.shape[0] > 1}
    assert full == {t.untyped_storage().data_ptr() for t in (*case.blocks, *([] if first else [case.partial]))}
