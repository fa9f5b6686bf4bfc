"""The Triton kernels' numbers, in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/ops/triton_numerics.py`.

`test_triton_kernels.py` runs this file in processes of its own: Triton interprets or compiles, never both in one.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attnres_compile.ops import factored
from attnres_compile.ops import triton as kernels
from tests.tolerances import assert_close

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    # The interpreter computes with numpy, also where a GPU's program has masked rows and columns.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
EPS, SCALE = 1e-5, 2.0
TOKENS = 5

# Sources, features, dtype. 1, 7 and 257 features have no wide loads.
SHAPES = [
    (1, 48, FLOAT),
    (2, 1, FLOAT),
    (33, 7, FLOAT),
    (9, 96, FLOAT),
    (9, 96, HALF),
    (9, 96, BRAIN),
    (2, 257, BRAIN),
    (2, 1024, HALF),
]


def randn(*shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
    return torch.randn(*shape).to(dtype)


def key(*shape: int) -> Tensor:
    return torch.randn(*shape) / math.sqrt(shape[-1])


def sources(n: int, d: int, dtype: torch.dtype = FLOAT) -> list[Tensor]:
    return [randn(TOKENS, d, dtype=dtype) for _ in range(n)]


def phase_1(d: int) -> tuple[Tensor, Tensor, Tensor]:
    return randn(TOKENS, d), randn(TOKENS), torch.rand(TOKENS) + 1


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Sequence):
        for element in value:
            yield from tensors(element)


def double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double()
    return [double(x) for x in value] if isinstance(value, list) else value


def check(name: str, *arguments: Any) -> None:
    """The kernel's results against those of `factored` for the same numbers in fp64."""
    actual = list(tensors(getattr(kernels, name)(*arguments)))
    expected = list(tensors(getattr(factored, name)(*(double(x) for x in arguments))))
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.is_contiguous()
        assert_close(a, e, f"{name}, result {i}")


def same(actual: Any, expected: Any) -> None:
    for a, e in zip(tensors(actual), tensors(expected), strict=True):
        assert a.dtype == e.dtype
        assert torch.equal(a, e)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("n, d, dtype", SHAPES, ids=str)
def test_read(n: int, d: int, dtype: torch.dtype) -> None:
    xs, k = sources(n, d, dtype), key(d)
    check("depth_attention", xs, k, EPS, SCALE)
    check("depth_attention_backward", randn(TOKENS, d, dtype=dtype), xs, k, EPS, SCALE)


def test_read_of_many_sources() -> None:
    check("depth_attention", sources(257, 2), key(2), EPS, SCALE)


@pytest.mark.parametrize(
    "n, d, dtype, S",
    [
        (1, 48, FLOAT, 3),
        (2, 1, FLOAT, 9),
        (6, 7, FLOAT, 2),
        (9, 96, FLOAT, 1),
        (4, 96, HALF, 3),
        (4, 96, BRAIN, 6),
        (2, 257, BRAIN, 5),
        (2, 1024, FLOAT, 2),
        (2, 16, FLOAT, 20),
    ],
    ids=str,
)
def test_phase_one(n: int, d: int, dtype: torch.dtype, S: int) -> None:
    xs, keys = sources(n, d, dtype), key(S, d)
    check("inter_block", xs, keys, EPS)
    check("inter_block_backward", randn(S, TOKENS, d), randn(S, TOKENS), randn(S, TOKENS), xs, keys, EPS)


def test_phase_one_of_equal_logits() -> None:
    # m follows the first of them.
    xs = sources(1, 16) * 3
    grads = randn(2, TOKENS, 16), randn(2, TOKENS), randn(2, TOKENS)
    check("inter_block_backward", *grads, xs, key(2, 16), EPS)


@pytest.mark.parametrize("d, dtype", [(d, dtype) for _, d, dtype in SHAPES], ids=str)
def test_phase_two(d: int, dtype: torch.dtype) -> None:
    statistics, partial, k = phase_1(d), randn(TOKENS, d, dtype=dtype), key(d)
    check("merge", *statistics, partial, k, EPS, SCALE)
    check("merge_backward", randn(TOKENS, d, dtype=dtype), *statistics, partial, k, EPS, SCALE)


@pytest.mark.parametrize("d, dtype", [(7, FLOAT), (96, HALF), (96, BRAIN), (257, BRAIN), (1024, FLOAT)], ids=str)
@pytest.mark.parametrize("centred, affine", [(False, True), (True, False), (True, True)])
def test_norm(d: int, dtype: torch.dtype, centred: bool, affine: bool) -> None:
    statistics, k = phase_1(d), key(d)
    partial, branch, grad, above = (randn(TOKENS, d, dtype=dtype) for _ in range(4))
    weight, bias = (randn(d, dtype=dtype), randn(d, dtype=dtype)) if affine else (None, None)
    options: Any = (EPS, EPS, SCALE, centred)
    total, normalised = kernels.add_merge_norm(partial, branch, *statistics, k, weight, bias, *options)
    assert_close(total, partial + branch)
    # fp64 would not round the sum, so it is given the rounded one.
    rounded: Any = double([total, torch.zeros_like(total), *statistics, k, weight, bias])
    assert_close(normalised, factored.add_merge_norm(*rounded, *options)[1])
    check("add_merge_norm_backward", above, grad, total, *statistics, k, weight, *options)
    check("add_merge_norm_backward", None, grad, total, *statistics, k, weight, *options)


def test_norm_of_a_wide_row(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its sums over rows are in memory; small here, since the interpreter takes its time.
    from attnres_compile.ops.triton import norm

    monkeypatch.setattr(norm, "_MOST_HELD", 0)
    test_norm(48, FLOAT, centred=True, affine=True)
    test_norm(600, FLOAT, centred=False, affine=True)


def padded(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, 8))[..., : x.shape[-1]]


def shifted(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (1, 2))[..., 1:-2]


def transposed(x: Tensor) -> Tensor:
    return x.T.contiguous().T


def expanded(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


@pytest.mark.parametrize("strided", [padded, shifted, transposed, expanded])
def test_read_strides(strided: Callable[[Tensor], Tensor]) -> None:
    k, (grad, *views) = key(16), [strided(x) for x in sources(4, 16, HALF)]
    copies = [x.contiguous() for x in views]
    views[1] = copies[1]
    same(kernels.depth_attention(views, k, EPS, SCALE), kernels.depth_attention(copies, k, EPS, SCALE))
    same(
        kernels.depth_attention_backward(grad, views, k, EPS, SCALE),
        kernels.depth_attention_backward(grad.contiguous(), copies, k, EPS, SCALE),
    )


@pytest.mark.parametrize("strided", [padded, shifted, transposed, expanded])
def test_phase_one_strides(strided: Callable[[Tensor], Tensor]) -> None:
    keys, grads = key(2, 16), (randn(2, TOKENS, 16), randn(2, TOKENS), randn(2, TOKENS))
    views = [strided(x) for x in sources(2, 16, HALF)]
    copies = [x.contiguous() for x in views]
    same(kernels.inter_block(views, keys, EPS), kernels.inter_block(copies, keys, EPS))
    same(
        kernels.inter_block_backward(*grads, views, keys, EPS),
        kernels.inter_block_backward(*grads, copies, keys, EPS),
    )


@pytest.mark.parametrize("strided", [padded, shifted, transposed, expanded])
def test_norm_strides(strided: Callable[[Tensor], Tensor]) -> None:
    k, m, l = key(16), randn(TOKENS), torch.rand(TOKENS) + 1
    views = [strided(x) for x in sources(4, 16, HALF)]
    o = strided(randn(TOKENS, 16))
    total, grad, above, branch = (x.contiguous() for x in views)
    results = [
        (
            kernels.merge(o, m, l, x, k, EPS, SCALE),
            kernels.merge_backward(g, o, m, l, x, k, EPS, SCALE),
            kernels.add_merge_norm(x, f, o, m, l, k, None, None, EPS, EPS, SCALE, False),
            kernels.add_merge_norm_backward(a, g, x, o, m, l, k, None, EPS, EPS, SCALE, False),
        )
        for x, g, a, f, o in ([*views, o], [total, grad, above, branch, o.contiguous()])
    ]
    same(*results)


def test_leading_axes() -> None:
    xs = [randn(3, 2, 16).transpose(0, 1) for _ in range(3)]
    keys = key(2, 16)
    check("depth_attention", xs, keys[0], EPS, SCALE)
    check("depth_attention_backward", randn(2, 3, 16), xs, keys[0], EPS, SCALE)
    check("inter_block", xs, keys, EPS)
    check("inter_block_backward", randn(2, 2, 3, 16), randn(2, 2, 3), randn(2, 2, 3), xs, keys, EPS)
    check("merge", randn(2, 3, 16), randn(2, 3), torch.rand(2, 3), xs[0], keys[0], EPS, SCALE)
    check("depth_attention", [x[0, 0] for x in xs], keys[0], EPS, SCALE)


def test_no_tokens() -> None:
    xs, keys = [x[:0] for x in sources(2, 8)], key(2, 8)
    o, m, l = kernels.inter_block(xs, keys, EPS)
    assert (o.shape, m.shape, l.shape) == ((2, 0, 8), (2, 0), (2, 0))
    read = (o[0], m[0], l[0])
    options: Any = (EPS, EPS, SCALE, True)
    assert kernels.depth_attention(xs, keys[0], EPS, SCALE).shape == (0, 8)
    assert kernels.merge(*read, xs[0], keys[0], EPS, SCALE).shape == (0, 8)
    total, y = kernels.add_merge_norm(xs[0], xs[1], *read, keys[0], None, None, *options)
    assert total.shape == y.shape == (0, 8)
    summed = [
        kernels.depth_attention_backward(xs[0], xs, keys[0], EPS, SCALE)[-1:],
        kernels.inter_block_backward(o, m, l, xs, keys, EPS)[-1:],
        kernels.merge_backward(xs[0], *read, xs[0], keys[0], EPS, SCALE)[-1:],
        kernels.add_merge_norm_backward(xs[0], xs[0], xs[0], *read, keys[0], None, *options)[-3:],
    ]
    for x in tensors(summed):
        assert x.numel() > 0
        assert not x.any()


@pytest.mark.parametrize("source", [0, 2])
def test_nan_stays_in_its_token(source: int) -> None:
    # Eight tokens share a program at this width.
    xs, keys, grad = sources(3, 48), key(2, 48), randn(TOKENS, 48)
    grads = randn(2, TOKENS, 48), randn(2, TOKENS), randn(2, TOKENS)
    read = phase_1(48)

    def results() -> Iterator[Tensor]:
        yield kernels.depth_attention(xs, keys[0], EPS, SCALE)
        yield from kernels.depth_attention_backward(grad, xs, keys[0], EPS, SCALE)[0]
        yield from (x.movedim(0, 1) for x in kernels.inter_block(xs, keys, EPS))
        yield from kernels.inter_block_backward(*grads, xs, keys, EPS)[0]
        x = xs[source]
        options: Any = (EPS, EPS, SCALE, True)
        yield kernels.merge(*read, x, keys[0], EPS, SCALE)
        yield from kernels.merge_backward(grad, *read, x, keys[0], EPS, SCALE)[:-1]
        yield from kernels.add_merge_norm(x, grad, *read, keys[0], None, None, *options)
        yield from kernels.add_merge_norm_backward(grad, grad, x, *read, keys[0], None, *options)[:-3]

    clean = list(results())
    xs[source][1] = float("nan")
    others = [0, 2, 3, 4]
    for a, e in zip(results(), clean, strict=True):
        assert torch.equal(a[others], e[others])
        assert a[1].isnan().all()


def test_sums_repeat() -> None:
    xs, k, grad = sources(2, 48), key(48), randn(TOKENS, 48)
    same(*(kernels.depth_attention_backward(grad, xs, k, EPS, SCALE) for _ in range(2)))


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("depth_attention", ([torch.ones(2, 4).double()] * 2, torch.ones(4).double(), EPS, SCALE)),
        ("depth_attention", ([torch.ones(2, 8193)] * 2, torch.ones(8193), EPS, SCALE)),
        ("depth_attention", ([torch.ones(2, 4), torch.ones(2, 4).half()], torch.ones(4), EPS, SCALE)),
        ("inter_block", ([torch.ones(2, 4)], torch.ones(129, 4), EPS)),
    ],
    ids=["fp64", "wide", "mixed", "many reads"],
)
def test_what_factored_takes(name: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = object()
    monkeypatch.setattr(factored, name, lambda *a: expected)
    assert getattr(kernels, name)(*arguments) is expected
