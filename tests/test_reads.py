"""The parameters of depth attention."""

import copy

import torch

from attnres_compile.reads import DepthReads


def test_parameters() -> None:
    reads = DepthReads(5, 8)
    assert {name: tuple(p.shape) for name, p in reads.named_parameters()} == {"query": (5, 8), "key_norm": (5, 8)}
    assert reads.state_dict().keys() == {"query", "key_norm"}
    assert not reads.query.any()
    assert reads.key_norm is not None
    assert bool((reads.key_norm == 1).all())
    assert all(parameter.requires_grad for parameter in reads.parameters())


def test_without_key_norm() -> None:
    reads = DepthReads(5, 8, key_norm=False)
    assert reads.key_norm is None
    assert reads.state_dict().keys() == {"query"}
    reads.reset_parameters()
    assert copy.deepcopy(reads).key_norm is None


def test_reset() -> None:
    reads = DepthReads(3, 4)
    torch.nn.init.normal_(reads.query)
    assert reads.key_norm is not None
    torch.nn.init.normal_(reads.key_norm)
    reads.reset_parameters()
    fresh = DepthReads(3, 4)
    assert all(torch.equal(a, b) for a, b in zip(reads.parameters(), fresh.parameters(), strict=True))


def test_device_and_dtype() -> None:
    reads = DepthReads(3, 4, device=torch.device("meta"), dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in reads.parameters()} == {("meta", torch.bfloat16)}
    assert {p.dtype for p in DepthReads(3, 4).to(torch.float64).parameters()} == {torch.float64}


def test_load_state_dict() -> None:
    first, second = DepthReads(3, 4), DepthReads(3, 4)
    torch.nn.init.normal_(first.query)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.query, second.query)


def test_description() -> None:
    assert repr(DepthReads(3, 4)) == "DepthReads(reads=3, width=4, key_norm=True)"
    assert repr(DepthReads(3, 4, key_norm=False)) == "DepthReads(reads=3, width=4, key_norm=False)"
