"""The numbers of the plugins' kernels, in Triton's interpreter: `TRITON_INTERPRET=1 pytest <this file>`."""

import os

import pytest
import torch
from torch import Tensor

from attnres_compile.exporters import tensorrt_kernels as kernels
from attnres_compile.ops import factored, reference
from attnres_compile.ops import triton as launched
from attnres_compile.ops.triton.launch import tile
from attnres_compile.ops.triton.phase_one import read_groups
from tests.tolerances import assert_close

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

EPS, TOKENS = 1e-5, 5
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SHAPES = [(1, 48, F32), (2, 7, F32), (9, 96, F16), (3, 257, BF16), (33, 16, F32)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def material(n: int, d: int, dtype: torch.dtype, *leading: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    query, key_norm = torch.randn(*leading, d) / d**0.5, 1 + torch.randn(*leading, d) / 4
    return query.to(dtype), key_norm, [torch.randn(TOKENS, d).to(dtype) for _ in range(n)]


@pytest.mark.parametrize("n, d, dtype", SHAPES, ids=str)
def test_depth_attention(n: int, d: int, dtype: torch.dtype) -> None:
    query, key_norm, sources = material(n, d, dtype)
    out, size = torch.empty(TOKENS, d, dtype=dtype), tile(d)
    grid = (size.count(TOKENS),)
    kernels.depth_attention[grid](
        query, key_norm, tuple(sources), TOKENS, out, EPS=EPS, SCALE=2.0, D=d, COLUMNS=size.columns, ROWS=size.rows
    )
    # The same steps as the kernels that eager code launches.
    assert torch.equal(out, launched.depth_attention(sources, query.float() * key_norm, EPS, 2.0))
    wide = [x.double() for x in (query, key_norm, *sources)]
    assert_close(out, reference.depth_attention(wide[2:], wide[0], wide[1], eps=EPS, scale=2.0))


@pytest.mark.parametrize("reads", [1, 6])
@pytest.mark.parametrize("n, d, dtype", SHAPES[:4], ids=str)
def test_inter_block(n: int, d: int, dtype: torch.dtype, reads: int) -> None:
    queries, key_norms, blocks = material(n, d, dtype, reads)
    os, zs = [torch.empty(TOKENS, d) for _ in range(reads)], [torch.empty(TOKENS) for _ in range(reads)]
    group, size = read_groups(reads, d)
    kernels.inter_block[(TOKENS * -(-reads // group),)](
        *(queries, key_norms, tuple(blocks), TOKENS, tuple(os), tuple(zs)),
        **{"EPS": EPS, "GROUP": group, "D": d, "COLUMNS": size.columns},
    )
    o, m, l = launched.inter_block(blocks, queries.float() * key_norms, EPS)
    assert torch.equal(torch.stack(os), o / l[..., None])
    wide = [x.double() for x in (queries, key_norms, *blocks)]
    o, m, l = reference.inter_block(wide[2:], wide[0], wide[1], eps=EPS)
    assert_close(torch.stack(os), o / l[..., None])
    assert_close(torch.stack(zs), m + l.log())


@pytest.mark.parametrize("d, dtype", [(d, dtype) for _, d, dtype in SHAPES], ids=str)
def test_merge(d: int, dtype: torch.dtype) -> None:
    query, key_norm, (partial,) = material(1, d, dtype)
    o, z = torch.randn(TOKENS, d), torch.randn(TOKENS)
    out, size = torch.empty(TOKENS, d, dtype=dtype), tile(d)
    sizes = {"D": d, "COLUMNS": size.columns, "ROWS": size.rows}
    kernels.merge[(size.count(TOKENS),)](o, z, partial, query, key_norm, TOKENS, out, EPS=EPS, SCALE=3.0, **sizes)
    wide = [x.double() for x in (o, z, torch.ones(TOKENS), partial, query, key_norm)]
    assert_close(out, reference.merge(*wide, eps=EPS, scale=3.0))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("d, dtype", [(d, dtype) for _, d, dtype in SHAPES[1:4]], ids=str)
def test_add_merge_norm(d: int, dtype: torch.dtype, centred: bool, add: bool) -> None:
    query, key_norm, (partial, branch) = material(2, d, dtype)
    o, z, weight, bias = torch.randn(TOKENS, d), torch.randn(TOKENS), torch.randn(d), torch.randn(d).to(dtype)
    total, out = torch.empty(TOKENS, d, dtype=dtype), torch.empty(TOKENS, d, dtype=dtype)
    size = tile(d)
    kernels.add_merge_norm[(size.count(TOKENS),)](
        *(o, z, partial, branch if add else None, query, key_norm, weight, bias, TOKENS, total if add else None, out),
        **{"EPS": EPS, "NORM_EPS": 1e-4, "SCALE": 3.0, "CENTRED": centred},
        **{"D": d, "COLUMNS": size.columns, "ROWS": size.rows},
    )
    if add:
        assert_close(total, partial + branch)
        fused = (o, z, torch.ones(TOKENS), query.float() * key_norm, weight, bias, EPS, 1e-4, 3.0, centred)
        assert all(map(torch.equal, (total, out), launched.add_merge_norm(partial, branch, *fused)))
    wide = [x.double() for x in (o, z, torch.ones(TOKENS), total if add else partial, query, key_norm)]
    h = reference.merge(*wide, eps=EPS, scale=3.0)
    assert_close(out, factored.normalise(h, weight.double(), bias.double(), 1e-4, centred))
