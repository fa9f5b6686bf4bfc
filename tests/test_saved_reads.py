"""Readers keep the merge that made their read, not the read."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile import saved_reads
from tests.integration.models import assert_same_gradients, randomise
from tests.tolerances import assert_close

F64 = torch.float64


class Norm(nn.Module):
    """An RMSNorm that tells where its inputs are."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.seen: list[Any] = []
        self.fails = self.changes = False

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(weakref.ref(x.untyped_storage()))
        if self.fails:
            raise RuntimeError("the reader fails")
        if self.changes:
            x.mul_(2)
        return self.weight * (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


class Layer(nn.Module):
    """Two sublayers."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(d) for _ in range(2))
        self.branches = nn.ModuleList(nn.Linear(d, d) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, branch in zip(self.norms, self.branches, strict=True):
            x = x + branch(norm(x)).tanh()
        return x


class Net(nn.Module):
    """Three layers, six sublayers."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(d, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(3))
        self.norm = Norm(d)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    made = ac.transform(Net().to(F64), x(), block_size=2, verify="off")
    randomise(made)
    for norm in norms(made):
        norm.seen.clear()
    return made


def x() -> Tensor:
    return torch.randn(2, 3, 8, dtype=F64, generator=torch.Generator().manual_seed(1))


def norms(model: nn.Module) -> list[Norm]:
    return [module for module in model.modules() if isinstance(module, Norm)]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(x()).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alive(model: nn.Module) -> list[bool]:
    return [any(storage() is not None for storage in norm.seen) for norm in norms(model)]


def test_reads_of_phase_two_are_not_kept(model: nn.Module) -> None:
    loss = model(x()).square().sum()
    # The first block has no phase 1: its reads are of the source itself, and of two sources.
    assert alive(model) == [True, True, False, False, False, False, False]
    loss.backward()


def test_gradients_are_those_of_reads_that_are_kept(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = gradients(model)
    monkeypatch.setattr("attnres_compile.attach.keep_merges", lambda reads: None)
    loss = model(x()).square().sum()
    assert all(alive(model))
    loss.backward()
    expected = gradients(model)
    assert_same_gradients(actual, expected)


def test_a_second_backward_reads_once_more(model: nn.Module) -> None:
    loss = model(x()).square().sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_others_who_look_after_what_is_kept_get_all_of_it(model: nn.Module) -> None:
    expected, kept = gradients(model), []

    def pack(tensor: Tensor) -> int:
        kept.append(tensor)
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, kept.__getitem__):
        actual = gradients(model)
    storages = {tensor.untyped_storage()._cdata for tensor in kept}
    assert all(norm.seen[-1]()._cdata in storages for norm in norms(model))
    assert_same_gradients(actual, expected)


def test_what_the_reader_changed_in_place_is_kept(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    norms(model)[3].changes = True
    actual = gradients(model)
    monkeypatch.setattr("attnres_compile.attach.keep_merges", lambda reads: None)
    assert_same_gradients(actual, gradients(model))


def test_a_reader_that_fails_leaves_no_hooks(model: nn.Module) -> None:
    norms(model)[3].fails = True
    with pytest.raises(RuntimeError, match="the reader fails"):
        model(x())
    assert saved_reads._top() is None


def test_nothing_is_asked_without_gradients(model: nn.Module) -> None:
    with torch.no_grad():
        quiet = model(x())
    assert_close(model(x()).detach(), quiet)
    assert saved_reads._top() is None
