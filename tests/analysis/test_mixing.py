"""Depth-mixing matrices: each form's own recurrence, run on unit vectors as outputs, gives its matrix."""

from collections.abc import Callable

import torch
from torch import Tensor

from attnres_compile.analysis import mixing
from tests.tolerances import assert_close

L, STREAMS = 5, 3
V = torch.eye(L + 1, dtype=torch.float64)  # the embedding and the outputs, told apart by their only entry


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def rows(step: Callable[[Tensor, int], Tensor]) -> Tensor:
    states = [V[0]]
    for l in range(1, L + 1):
        states.append(step(states[-1], l))
    return torch.stack(states)


def test_residual() -> None:
    assert_close(mixing.residual(L), rows(lambda h, l: h + V[l]))


def test_highway() -> None:
    gates = noise(L).sigmoid()
    assert_close(mixing.highway(gates.tolist()), rows(lambda h, l: (1 - gates[l - 1]) * h + gates[l - 1] * V[l]))


def test_denseformer() -> None:
    weights = noise(L + 1, L + 1)
    states, reads = [V[0]], [weights[0, 0] * V[0]]
    for l in range(1, L + 1):
        states.append(reads[-1] + V[l])
        reads.append(sum((weights[l, i] * states[i] for i in range(l + 1)), torch.zeros_like(V[0])))
    assert_close(mixing.denseformer(weights), torch.stack(reads))
    assert_close(mixing.denseformer(torch.eye(L + 1)), mixing.residual(L))


def test_hyper_connections() -> None:
    carry, write, read = noise(L, STREAMS, STREAMS), noise(L, STREAMS), noise(L + 1, STREAMS)
    state, reads = torch.stack([V[0]] * STREAMS), [read[0] @ torch.stack([V[0]] * STREAMS)]
    for l in range(1, L + 1):
        state = carry[l - 1] @ state + torch.outer(write[l - 1], V[l])
        reads.append(read[l] @ state)
    assert_close(mixing.hyper_connections(carry, write, read), torch.stack(reads))
    identity = torch.eye(STREAMS).expand(L, STREAMS, STREAMS)
    uniform = torch.full((L + 1, STREAMS), 1 / STREAMS, dtype=torch.float64)
    assert_close(mixing.hyper_connections(identity, torch.ones(L, STREAMS), uniform), mixing.residual(L))


def test_doubly_stochastic() -> None:
    balanced = mixing.doubly_stochastic(noise(2, 4, 4), iterations=200)
    assert balanced.min() > 0
    assert_close(balanced.sum(-1), torch.ones(2, 4))
    assert_close(balanced.sum(-2), torch.ones(2, 4))


def test_examples_are_lower_triangular() -> None:
    for name, matrix in mixing.examples(L).items():
        assert matrix.shape == (L + 1, L + 1) and matrix.dtype == torch.float64, name
        assert not matrix.triu(1).any(), name
