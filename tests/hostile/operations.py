"""What random programs are made of: operations on registers, decent and odd, and the shapes that they take."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BATCH, TOKENS, WIDTH = 2, 3, 4

# What values look like. Programs keep track of it, so that every program runs.
SHAPES: dict[str, tuple[int, ...]] = {
    "btd": (BATCH, TOKENS, WIDTH),
    "nd": (BATCH * TOKENS, WIDTH),
    "tbd": (TOKENS, BATCH, WIDTH),
    "bdt": (BATCH, WIDTH, TOKENS),
    "b1td": (BATCH, 1, TOKENS, WIDTH),
}


class Constant(nn.Module):
    """A parameter that is read as it is."""

    def __init__(self, *shape: int, around: float = 0.0) -> None:
        super().__init__()
        self.value = nn.Parameter(around + 0.3 * torch.randn(shape))


class Branch(nn.Module):
    """A norm, a weight, an activation: what a sublayer does to the stream, in a module of its own."""

    def __init__(self, norm: str = "layer") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if norm == "layer" else nn.Identity()
        self.weight = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.weight(self.norm(x)))


class Positioned(Branch):
    """A branch that adds a constant to what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.position)


class ChannelBranch(nn.Module):
    """A branch for streams whose features are the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.GroupNorm(1, WIDTH), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.weight(self.norm(x)))


class Gated(nn.Module):
    """A linear map of two values side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.weight(torch.cat([x, y], -1)))


class Cross(nn.Module):
    """Attention of one stream to another."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.softmax(x @ self.key(y).transpose(-1, -2), -1) @ y


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def layer_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def in_place(change: Callable[..., Any]) -> Callable[..., Tensor]:
    """The value after a change of it for its effect alone."""

    def changed(part: Any, x: Tensor, *others: Tensor) -> Tensor:
        change(x, *others)
        return x

    return changed


def iadd(part: Any, x: Tensor, f: Tensor) -> Tensor:
    x += f
    return x


def assigned(x: Tensor, f: Tensor) -> None:
    x[:, 0] = f[:, 0]


@dataclass(frozen=True)
class Op:
    """An operation: what it computes from its own parameters and its operands, and what shapes it takes."""

    run: Callable[..., Tensor]
    make: Callable[[], nn.Module] | None = None
    arity: int = 1
    kinds: tuple[str, ...] = ("btd", "nd", "tbd", "b1td")
    changes: Mapping[str, str] = field(default_factory=dict)
    weight: int = 1


EVERY = tuple(SHAPES)
LAST = ("btd", "nd", "tbd", "b1td")

OPS: dict[str, Op] = {
    # Sublayers.
    "branch": Op(lambda p, x: p(x), Branch, kinds=LAST, weight=8),
    "branch of a copy": Op(lambda p, x: p(x.clone()), Branch, kinds=LAST, weight=2),
    "branch without norm": Op(lambda p, x: p(x), lambda: Branch("none"), weight=2),
    "branch with position": Op(lambda p, x: p(x), Positioned),
    "channel branch": Op(lambda p, x: p(x), ChannelBranch, kinds=("bdt",), weight=8),
    "linear": Op(lambda p, x: F.linear(x, p.value), lambda: Constant(WIDTH, WIDTH), weight=3),
    "linear module": Op(lambda p, x: p(x), lambda: nn.Linear(WIDTH, WIDTH), weight=2),
    "gated": Op(lambda p, x, y: p(x, y), Gated, arity=2),
    "cross": Op(lambda p, x, y: p(x, y), Cross, arity=2, kinds=("btd",)),
    "checkpoint": Op(lambda p, x: checkpoint(p, x, use_reentrant=False), Branch),
    # Norms, in modules, in functions, by hand.
    "layer norm": Op(lambda p, x: F.layer_norm(x, (WIDTH,)), weight=2),
    "norm module": Op(lambda p, x: p(x), lambda: nn.LayerNorm(WIDTH)),
    "rms by hand": Op(lambda p, x: rms(x, p.value), lambda: Constant(WIDTH, around=1.0)),
    "layer norm by hand": Op(lambda p, x: layer_by_hand(x, p.value), lambda: Constant(WIDTH, around=1.0)),
    # Adds.
    "add": Op(lambda p, x, f: x + f, arity=2, kinds=EVERY, weight=14),
    "radd": Op(lambda p, x, f: f + x, arity=2, kinds=EVERY, weight=4),
    "torch.add": Op(lambda p, x, f: torch.add(x, f), arity=2, kinds=EVERY),
    "add alpha": Op(lambda p, x, f: torch.add(x, f, alpha=0.5), arity=2, kinds=EVERY),
    "sub": Op(lambda p, x, f: x - f, arity=2, kinds=EVERY, weight=2),
    "rsub": Op(lambda p, x, f: torch.rsub(x, f), arity=2, kinds=EVERY),
    "sum": Op(lambda p, x, f: sum([x, f]), arity=2, kinds=EVERY),  # type: ignore[arg-type, return-value]
    "add three": Op(lambda p, x, f, g: x + f + g, arity=3, kinds=EVERY, weight=2),
    "add pair first": Op(lambda p, x, f, g: x + (f + g), arity=3, kinds=EVERY, weight=2),
    "addcmul": Op(lambda p, x, f: torch.addcmul(x, p.value, f), lambda: Constant(WIDTH), arity=2, kinds=LAST),
    "addcmul of both": Op(lambda p, x, f: torch.addcmul(x, x, f, value=0.1), arity=2, kinds=EVERY),
    "addmm": Op(lambda p, x, f: torch.addmm(x, f, p.value), lambda: Constant(WIDTH, WIDTH), arity=2, kinds=("nd",)),
    "add transposed": Op(
        lambda p, x, f: x + p(f.transpose(0, 1)).transpose(0, 1), Branch, arity=2, kinds=("btd",), weight=2
    ),
    "stack": Op(lambda p, x, f: torch.stack([x, f]).sum(0), arity=2, kinds=EVERY),
    "lerp": Op(lambda p, x, f: torch.lerp(x, f, 0.3), arity=2, kinds=EVERY),
    # Constants.
    "add number": Op(lambda p, x: x + 0.7, kinds=EVERY),
    "add zero": Op(lambda p, x: 0 + x, kinds=EVERY),
    "number minus": Op(lambda p, x: 0.7 - x, kinds=EVERY),
    "add vector": Op(lambda p, x: x + p.value, lambda: Constant(WIDTH), kinds=LAST),
    "add positions": Op(lambda p, x: p.value + x, lambda: Constant(TOKENS, WIDTH), kinds=("btd",)),
    "add mask": Op(lambda p, x: x + p.value, lambda: Constant(TOKENS, 1), kinds=("btd",)),
    "add scalar": Op(lambda p, x: x + p.value, Constant, kinds=EVERY),
    # Scales.
    "scale": Op(lambda p, x: 1.3 * x, kinds=EVERY, weight=2),
    "divide": Op(lambda p, x: x / 1.7, kinds=EVERY),
    "negate": Op(lambda p, x: -x, kinds=EVERY),
    "learned scale": Op(lambda p, x: p.value * x, lambda: Constant(around=1.0), kinds=EVERY, weight=2),
    "learned scale of one": Op(lambda p, x: x * p.value, lambda: Constant(1, around=1.0), kinds=EVERY),
    "learned scale of three axes": Op(lambda p, x: x * p.value, lambda: Constant(1, 1, 1, around=1.0), kinds=("btd",)),
    "learned scale of features": Op(lambda p, x: x * p.value, lambda: Constant(WIDTH, around=1.0), kinds=LAST),
    "scale by length": Op(lambda p, x: x / x.shape[-1], kinds=EVERY),
    "gate": Op(lambda p, x, y: x * torch.sigmoid(y), arity=2, kinds=EVERY),
    "square": Op(lambda p, x: x * x, kinds=EVERY),
    # Forms of the same value.
    "alias": Op(lambda p, x: x, kinds=EVERY),
    "clone": Op(lambda p, x: x.clone(), kinds=EVERY, weight=2),
    "contiguous": Op(lambda p, x: x.contiguous(), kinds=EVERY),
    "narrow": Op(lambda p, x: x.float().double(), kinds=EVERY),
    "cast": Op(lambda p, x: x.to(torch.float64), kinds=EVERY),
    "dropout": Op(lambda p, x: F.dropout(x, 0.1, False), kinds=EVERY),
    "dropout module": Op(lambda p, x: p(x), lambda: nn.Dropout(0.1), kinds=EVERY),
    "identity module": Op(lambda p, x: p(x), nn.Identity, kinds=EVERY),
    "detach": Op(lambda p, x: x.detach(), kinds=EVERY),
    "flatten": Op(lambda p, x: x.reshape(-1, WIDTH), kinds=("btd",), changes={"btd": "nd"}),
    "view": Op(lambda p, x: x.view(BATCH, TOKENS, WIDTH), kinds=("nd",), changes={"nd": "btd"}, weight=3),
    "view tokens": Op(lambda p, x: x.view(-1, WIDTH), kinds=("btd",), changes={"btd": "nd"}),
    "view rows": Op(lambda p, x: torch.relu(x).view(x.shape[0], -1).view(x.shape), kinds=EVERY, weight=2),
    "view bits": Op(lambda p, x: x.view(torch.int64).view(torch.float64), kinds=EVERY),
    "transpose": Op(
        lambda p, x: x.transpose(0, 1), kinds=("btd", "tbd"), changes={"btd": "tbd", "tbd": "btd"}, weight=2
    ),
    "channels": Op(lambda p, x: x.permute(0, 2, 1), kinds=("btd", "bdt"), changes={"btd": "bdt", "bdt": "btd"}),
    "unsqueeze": Op(lambda p, x: x.unsqueeze(1), kinds=("btd",), changes={"btd": "b1td"}),
    "squeeze": Op(lambda p, x: x.squeeze(1), kinds=("b1td",), changes={"b1td": "btd"}, weight=3),
    "flip tokens": Op(lambda p, x: x[:, [2, 1, 0]], kinds=("btd",)),
    "roll": Op(lambda p, x: torch.cat([x[:, 1:], x[:, :1]], 1), kinds=("btd",)),
    "halves": Op(lambda p, x: torch.cat([x[..., 2:], x[..., :2]], -1), kinds=LAST),
    # Other readers.
    "relu": Op(lambda p, x: torch.relu(x), kinds=EVERY),
    "tanh": Op(lambda p, x: x.tanh(), kinds=EVERY),
    "mean": Op(lambda p, x: x - x.mean(-1, keepdim=True), kinds=EVERY),
    "token mean": Op(lambda p, x: x.mean(1, keepdim=True).expand_as(x), kinds=("btd",)),
    "where": Op(lambda p, x, y: torch.where(x > 0, x, y), arity=2, kinds=EVERY),
    # In place.
    "iadd": Op(iadd, arity=2, kinds=EVERY, weight=3),
    "add_": Op(lambda p, x, f: x.add_(f), arity=2, kinds=EVERY),
    "add_ unbound": Op(in_place(lambda x, f: x.add_(f)), arity=2, kinds=EVERY),
    "sub_": Op(lambda p, x, f: x.sub_(f), arity=2, kinds=EVERY),
    "mul_": Op(lambda p, x: x.mul_(1.1), kinds=EVERY),
    "relu_": Op(lambda p, x: torch.relu_(x), kinds=EVERY),
    "relu in place": Op(lambda p, x: F.relu(x, inplace=True), kinds=EVERY),
    "relu module in place": Op(lambda p, x: p(x), lambda: nn.ReLU(inplace=True), kinds=EVERY),
    "add into": Op(lambda p, x, f: torch.add(x, f, out=x), arity=2, kinds=EVERY),
    "add to a view": Op(in_place(lambda x, f: x.view(x.shape).add_(f)), arity=2, kinds=("nd",)),
    "add to a row": Op(in_place(lambda x, f: x[:, 0].add_(f[:, 0])), arity=2, kinds=("btd",)),
    "assign a row": Op(in_place(assigned), arity=2, kinds=("btd",)),
    "copy_": Op(in_place(lambda x, f: x.copy_(f)), arity=2, kinds=EVERY),
}

ADDS = ("add", "add", "add", "radd", "torch.add", "add alpha", "sub", "sum", "iadd", "add_")
MUTATING = {"iadd", "add_", "add_ unbound", "sub_", "mul_", "relu_", "relu in place", "relu module in place"}
MUTATING |= {"add into", "add to a view", "add to a row", "assign a row", "copy_"}


def _weighted(kind: str, without: frozenset[str] | set[str]) -> list[str]:
    return [name for name, op in OPS.items() if kind in op.kinds and name not in without for _ in range(op.weight)]


ANY = {kind: _weighted(kind, frozenset()) for kind in SHAPES}
CALM = {kind: _weighted(kind, MUTATING) for kind in SHAPES}
