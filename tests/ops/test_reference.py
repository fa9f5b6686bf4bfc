"""The reference agrees with itself, with numbers worked out by hand and with a model written by hand."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnres_compile.ops import reference
from tests.block_attnres import (
    HandWrittenBlockAttnRes,
    NormName,
    ParallelTransformer,
    PlainTransformer,
    randomise,
)
from tests.tolerances import assert_close

EPS = 1e-6
F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def sources(count: int, *shape: int) -> list[Tensor]:
    return [normal(*shape, seed=seed) for seed in range(count)]


def test_depth_attention_by_hand() -> None:
    # The mean squares are 25/2 and 4, so the keys are [3, 4] / sqrt(12.5) = [0.6, 0.8] * sqrt(2) and [0, sqrt(2)];
    # with key_norm * query = [5, 0] / sqrt(2) the logits are 3 and 0.
    v = [torch.tensor([3.0, 4.0], dtype=F64), torch.tensor([0.0, math.sqrt(8.0)], dtype=F64)]
    query, key_norm = torch.tensor([2.5 / math.sqrt(2), 0.0], dtype=F64), torch.tensor([2.0, 7.0], dtype=F64)
    first = math.exp(3.0) / (math.exp(3.0) + 1)
    h = reference.depth_attention(v, query, key_norm, eps=0.0)
    expected = torch.tensor([3 * first, 4 * first + math.sqrt(8.0) * (1 - first)], dtype=F64)
    assert_close(h, expected)
    assert_close(reference.depth_attention(v, query, key_norm, eps=0.0, scale=2.0), 2 * expected)


def test_eps_is_added_to_the_mean_square() -> None:
    v = [torch.tensor([2.0, 2.0], dtype=F64), torch.zeros(2, dtype=F64)]
    h = reference.depth_attention(v, torch.tensor([math.log(3.0), 0.0], dtype=F64), None, eps=12.0)
    # The first key is 2 / sqrt(4 + 12) = 1/2, so the weights are sqrt(3) : 1.
    assert_close(h, torch.full((2,), 2 * math.sqrt(3) / (math.sqrt(3) + 1), dtype=F64))


def test_inter_block_and_merge_by_hand() -> None:
    # d = 1 and eps = 0: every key is the sign of its source, so logits are +query or -query.
    blocks = [torch.tensor([5.0], dtype=F64), torch.tensor([-3.0], dtype=F64)]
    queries = torch.tensor([[math.log(2.0)], [0.0]], dtype=F64)
    o, m, l = reference.inter_block(blocks, queries, None, eps=0.0)
    assert_close(m, torch.tensor([math.log(2.0), 0.0], dtype=F64))
    assert_close(l, torch.tensor([1.25, 2.0], dtype=F64))
    assert_close(o, torch.tensor([[5 - 3 / 4], [2.0]], dtype=F64))
    h = reference.merge(o[0], m[0], l[0], torch.tensor([7.0], dtype=F64), queries[0], None, eps=0.0, scale=1.0)
    # Weights 2 : 1/2 : 2.
    assert_close(h, torch.tensor([(10 - 1.5 + 14) / 4.5], dtype=F64))


@pytest.mark.parametrize("leading", [(), (3,), (2, 5)])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5, 33])
def test_two_phases_equal_one(count: int, with_norm: bool, leading: tuple[int, ...]) -> None:
    *blocks, partial = sources(count + 1, *leading, 13)
    queries, norms = normal(3, 13, seed=100), normal(3, 13, seed=101) if with_norm else None
    o, m, l = reference.inter_block(blocks, queries, norms, eps=EPS)
    for row in range(3):
        norm = None if norms is None else norms[row]
        whole = reference.depth_attention([*blocks, partial], queries[row], norm, eps=EPS, scale=1.5)
        two = reference.merge(o[row], m[row], l[row], partial, queries[row], norm, eps=EPS, scale=1.5)
        assert_close(two, whole, f"row {row}")
        first = reference.depth_attention(blocks, queries[row], norm, eps=EPS, scale=1.5)
        alone = reference.merge(o[row], m[row], l[row], None, queries[row], norm, eps=EPS, scale=1.5)
        assert_close(alone, first, f"row {row} without partial sum")


@pytest.mark.parametrize("count", [1, 2, 9, 40])
def test_zero_query_is_the_scaled_mean(count: int) -> None:
    v = sources(count, 4, 10)
    h = reference.depth_attention(v, torch.zeros(10, dtype=F64), normal(10, seed=99), eps=EPS, scale=2.5)
    assert_close(h, 2.5 * torch.stack(v).mean(0))


def test_one_source_is_the_identity() -> None:
    v = normal(4, 10)
    assert_close(reference.depth_attention([v], normal(10, seed=1), normal(10, seed=2), eps=EPS), v)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_compute_in_fp32(dtype: torch.dtype) -> None:
    v = [x.to(dtype) for x in sources(5, 4, 10)]
    query, norm = normal(10, seed=10).to(dtype), normal(10, seed=11).to(dtype)
    h = reference.depth_attention(v, query, norm, eps=EPS)
    exact = reference.depth_attention([x.float() for x in v], query.float(), norm.float(), eps=EPS)
    assert h.dtype == dtype
    assert torch.equal(h, exact.to(dtype))
    statistics = reference.inter_block(v, query[None], norm[None], eps=EPS)
    assert [x.dtype for x in statistics] == [torch.float32] * 3
    o, m, l = (x[0] for x in statistics)
    assert reference.merge(o, m, l, v[0], query, norm, eps=EPS, scale=1.0).dtype == dtype
    assert reference.merge(o, m, l, None, query, norm, eps=EPS, scale=1.0).dtype == torch.float32


def linear_sublayers(count: int, width: int) -> list[Callable[[Tensor], Tensor]]:
    def sublayer(weight: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.tanh(x @ weight)

    return [sublayer(normal(width, width, seed=50 + i)) for i in range(count)]


BLOCKS = [[1] * 6, [2, 2, 2], [4, 2], [1, 3, 2], [6]]


@pytest.mark.parametrize("blocks", BLOCKS)
def test_block_attnres_starts_as_the_residual_stream(blocks: list[int]) -> None:
    source, sublayers = normal(3, 8), linear_sublayers(6, 8)
    stream = source
    for sublayer in sublayers:
        stream = stream + sublayer(stream)
    out = reference.block_attnres(source, sublayers, torch.zeros(6, 8, dtype=F64), None, blocks, eps=EPS, preserve=True)
    assert_close(out, stream)


@pytest.mark.parametrize("preserve", [False, True])
def test_block_attnres_by_hand(preserve: bool) -> None:
    source, (f, g, k) = normal(3, 8), linear_sublayers(3, 8)
    w, key_norm = normal(3, 8, seed=60), normal(3, 8, seed=61)

    def read(row: int, *values: Tensor) -> Tensor:
        scale = float(len(values)) if preserve else 1.0
        return reference.depth_attention(values, w[row], key_norm[row], eps=EPS, scale=scale)

    a = f(source)
    b = g(read(0, source, a))
    c = k(read(1, source, a + b))
    out = reference.block_attnres(source, [f, g, k], w, key_norm, [2, 1], eps=EPS, preserve=preserve)
    assert_close(out, read(2, source, a + b, c))
    b = g(read(0, source, a))
    c = k(read(1, source, a, b))
    out = reference.block_attnres(source, [f, g, k], w, key_norm, [1, 2], eps=EPS, preserve=preserve)
    assert_close(out, read(2, source, a, b + c))


def test_block_attnres_refuses_blocks_that_do_not_add_up() -> None:
    with pytest.raises(ValueError, match="do not add up"):
        reference.block_attnres(normal(8), linear_sublayers(3, 8), normal(3, 8), None, [2], eps=EPS, preserve=True)


def tokens() -> Tensor:
    return torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_model_at_zero_queries_is_the_plain_model(blocks: list[int], norm: NormName) -> None:
    torch.manual_seed(0)
    plain = PlainTransformer(layers=3, norm=norm).double()
    assert_close(HandWrittenBlockAttnRes(plain, blocks)(tokens()), plain(tokens()))


@pytest.mark.parametrize("blocks", [[1, 1, 1], [2, 1], [3]])
def test_parallel_model_at_zero_queries_is_the_plain_model(blocks: list[int]) -> None:
    torch.manual_seed(0)
    plain = ParallelTransformer(layers=3).double()
    assert_close(HandWrittenBlockAttnRes(plain, blocks)(tokens()), plain(tokens()))


@pytest.mark.parametrize("preserve", [False, True])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_model_equals_the_recurrence(blocks: list[int], preserve: bool) -> None:
    torch.manual_seed(0)
    plain = PlainTransformer(layers=3).double()
    model = HandWrittenBlockAttnRes(plain, blocks, preserve=preserve)
    randomise(model)
    hidden = reference.block_attnres(
        plain.embed(tokens()), plain.sublayers(), model.query, model.key_norm, blocks, eps=model.eps, preserve=preserve
    )
    logits = model(tokens())
    assert_close(logits, plain.head(plain.norm(hidden)))
    assert (logits - plain(tokens())).abs().max() > 0.1
