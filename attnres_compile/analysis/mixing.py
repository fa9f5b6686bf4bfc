"""Depth-mixing matrices: what each state of a residual stream is made of, ``h_l = sum_i M[l, i] v_i``.

``v_0`` is the embedding and ``v_i`` the output of sublayer i. All are ``[L + 1, L + 1]`` in fp64, lower triangular; row
l is what is read after l sublayers. The forms are those that the paper (arXiv 2603.15031) sets side by side; AttnRes'
own is measured (``ChainMeasure.mixing``), since it depends on the input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def residual(sublayers: int) -> Tensor:
    """The standard stream ``h_l = h_{l-1} + v_l``: ones."""
    return torch.ones(sublayers + 1, sublayers + 1, dtype=torch.float64).tril()


def highway(gates: Sequence[float]) -> Tensor:
    """A Highway stream ``h_l = (1 - g_l) h_{l-1} + g_l v_l`` (arXiv 1505.00387), with one gate per sublayer."""
    mixing = torch.zeros(len(gates) + 1, len(gates) + 1, dtype=torch.float64)
    mixing[0, 0] = 1
    for l, gate in enumerate(gates, 1):
        mixing[l] = (1 - gate) * mixing[l - 1]
        mixing[l, l] = gate
    return mixing


def denseformer(weights: Tensor) -> Tensor:
    """DenseFormer (arXiv 2402.02622): ``x_l = h_{l-1} + v_l``, then ``h_l = sum_{i<=l} a[l, i] x_i``.

    Args:
        weights: static averages ``a [L + 1, L + 1]``; what is above the diagonal is not used.
    """
    size = weights.shape[0]
    states, mixing = [torch.eye(size, dtype=torch.float64)[0]], torch.zeros(size, size, dtype=torch.float64)
    for l in range(size):
        if l:
            states.append(mixing[l - 1] + torch.eye(size, dtype=torch.float64)[l])
        mixing[l] = (weights[l, : l + 1].double().unsqueeze(-1) * torch.stack(states)).sum(0)
    return mixing


def hyper_connections(carry: Tensor, write: Tensor, read: Tensor) -> Tensor:
    """Hyper-connections (arXiv 2409.19606): m streams ``H_l = A_l H_{l-1} + b_l v_l``, read as ``h_l = c_l H_l``.

    All streams start as the embedding. With doubly stochastic ``A_l`` these are mHC (arXiv 2512.24880).

    Args:
        carry: ``A [L, m, m]``.
        write: ``b [L, m]``.
        read: ``c [L + 1, m]``; the last is the final state's.
    """
    sublayers, streams = write.shape
    state = torch.zeros(streams, sublayers + 1, dtype=torch.float64)
    state[:, 0] = 1
    rows = [read[0].double() @ state]
    for l in range(1, sublayers + 1):
        state = carry[l - 1].double() @ state
        state[:, l] = write[l - 1].double()
        rows.append(read[l].double() @ state)
    return torch.stack(rows)


def doubly_stochastic(logits: Tensor, iterations: int = 20) -> Tensor:
    """Sinkhorn's balancing of ``exp(logits) [..., m, m]``: rows and columns sum to one, as mHC carries its streams."""
    balanced = logits.double().exp()
    for _ in range(iterations):
        balanced = balanced / balanced.sum(-1, keepdim=True)
        balanced = balanced / balanced.sum(-2, keepdim=True)
    return balanced


def examples(sublayers: int) -> dict[str, Tensor]:
    """One matrix of each form other than AttnRes, for pictures: with weights made up, not trained."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    static = torch.eye(sublayers + 1, dtype=torch.float64) + 0.1 * noise(sublayers + 1, sublayers + 1)
    carry = doubly_stochastic(noise(sublayers, 4, 4) + 3 * torch.eye(4, dtype=torch.float64))
    write, read = 2 * noise(sublayers, 4).sigmoid(), noise(sublayers + 1, 4).softmax(-1)
    return {
        "residual": residual(sublayers),
        "Highway": highway((noise(sublayers) - 2).sigmoid().tolist()),
        "DenseFormer": denseformer(static),
        "mHC, 4 streams": hyper_connections(carry, write, read),
    }
