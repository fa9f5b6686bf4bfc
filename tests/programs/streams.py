"""What happens to the stream beside its adds: more than one of it, states kept and used again, changes of shape."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.parts import WIDTH, Block, Collection, Net, Pair, RawBranch

PROGRAMS = Collection()

State = tuple[Tensor, Tensor]


class DeferredLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.branch = RawBranch()

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> State:
        residual = hidden if residual is None else hidden + residual
        return self.branch(self.norm(residual)), residual


@PROGRAMS.net(pushes=4)
class DeferredAdd(Net):
    """A layer hands out its branch and the residual, and the next layer adds them: the pushes are three in layers and
    one at the end."""

    layer = DeferredLayer

    def middle(self, x: Tensor) -> Tensor:
        hidden, residual = self.layers[0](x)
        for layer in self.layers[1:]:
            hidden, residual = layer(hidden, residual)
        return hidden + residual


class DeferredTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = DeferredLayer()
        self.second = DeferredLayer()

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> State:
        return self.second(*self.first(hidden, residual))


@PROGRAMS.net(pushes=8)
class DeferredPairs(Net):
    """As DeferredAdd with two branches in a layer: eight branches, seven of them added in layers and one at the end."""

    layer = DeferredTwice

    def middle(self, x: Tensor) -> Tensor:
        hidden, residual = self.layers[0](x)
        for layer in self.layers[1:]:
            hidden, residual = layer(hidden, residual)
        return hidden + residual


@PROGRAMS.net(pushes=11)
class InjectedInLoop(Net):
    """u * x + v * x0 with learned numbers before each layer. The first mix makes the source; three more push v * x0,
    with u as a coefficient, and the branches push eight times."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.tensor([1.1, 0.9, 1.2, 0.8]))
        self.v = nn.Parameter(torch.tensor([0.1, 0.2, 0.3, 0.4]))

    def middle(self, x: Tensor) -> Tensor:
        source = x
        for index, layer in enumerate(self.layers):
            x = layer(self.u[index] * x + self.v[index] * source)
        return x


class InjectedLayer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.tensor([1.1, 0.2]))

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        assert source is not None
        return super().forward(self.mix[0] * x + self.mix[1] * source)


@PROGRAMS.net(pushes=12)
class InjectedInLayer(Net):
    """As InjectedInLoop, but each of four layers receives x and x0 and mixes them: three pushes in each."""

    layer = InjectedLayer

    def middle(self, x: Tensor) -> Tensor:
        source = x
        for layer in self.layers:
            x = layer(x, source)
        return x


@PROGRAMS.net(pushes=11)
class InjectedPlainly(Net):
    """x + x0 before each layer. The first makes the source, three are pushes, and the branches push eight times. The
    older of the two terms is the one that must not be taken for the skip."""

    def middle(self, x: Tensor) -> Tensor:
        source = x
        for layer in self.layers:
            x = layer(x + source)
        return x


@PROGRAMS.net(pushes=11)
class PositionAgain(Net):
    """A learned term, the same for every token, before each layer: it pushes three times, broadcast, after the source;
    the branches push eight times."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 1, WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x + self.position)
        return x


class GatedLayer(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift_f, scale_f, gate_f, shift_g, scale_g, gate_g = (
            self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        )
        x = x + gate_f * self.f(x * (1 + scale_f) + shift_f)
        return x + gate_g * self.g(x * (1 + scale_g) + shift_g)


@PROGRAMS.net(pushes=8)
class AdaptiveNorm(Net):
    """AdaLN: shift, scale and gate come from a condition. Branches read a modulated stream; two pushes in each of
    four."""

    layer = GatedLayer

    def middle(self, x: Tensor) -> Tensor:
        condition = x.mean(1)
        for layer in self.layers:
            x = layer(x, condition)
        return x


@PROGRAMS.net(pushes=10)
class SkipByAdd(Net):
    """U-shaped: kept states, weighted, are added in the second half. Eight pushes of branches, two of states."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([0.5, 0.7]))

    def middle(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers[:2]:
            x = layer(x)
            kept.append(x)
        for weight, layer in zip(self.weights, self.layers[2:], strict=True):
            x = layer(x + weight * kept.pop())
        return x


@PROGRAMS.net(pushes=8)
class SkipByCat(Net):
    """U-shaped: kept states are concatenated and projected, so that a new stream starts. Chains of 4, 2 and 2."""

    def __init__(self) -> None:
        super().__init__()
        self.merge = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))

    def middle(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers[:2]:
            x = layer(x)
            kept.append(x)
        for merge, layer in zip(self.merge, self.layers[2:], strict=True):
            x = layer(merge(torch.cat([x, kept.pop()], -1)))
        return x


class MergingLayer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.merge = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        return super().forward(x if kept is None else self.merge(torch.cat([x, kept], -1)))


@PROGRAMS.net(pushes=8)
class SkipInLayer(Net):
    """As SkipByCat, but a layer receives the kept state and merges it itself. Chains of four, two and two; the sources
    of the last two are outputs of a projection inside the layer."""

    layer = MergingLayer

    def middle(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers[:2]:
            x = layer(x)
            kept.append(x)
        for layer in self.layers[2:]:
            x = layer(x, kept.pop())
        return x


@PROGRAMS.net(pushes=11)
class KeptInList(Net):
    """The loop keeps each layer's state, and all are added at the end: eight pushes of branches, and three of states
    on the oldest one."""

    def middle(self, x: Tensor) -> Tensor:
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        return sum(states[1:], states[0]) / 4


@PROGRAMS.net(pushes=8)
class MeanOfStates(Net):
    """The loop reads each state's mean, and adds them at the end. A term that is constant along the features
    is no source: eight pushes of branches."""

    def middle(self, x: Tensor) -> Tensor:
        means: Tensor | float = 0.0
        for layer in self.layers:
            x = layer(x)
            means = means + x.mean(-1, keepdim=True)
        return x + means


class TwoStreamLayer(Pair):
    def forward(self, x: Tensor, context: Tensor) -> State:
        update = self.f(x + context)
        length = context.shape[1]
        return x + update, context + self.g(torch.cat([context, x], 1))[:, :length]


@PROGRAMS.net(pushes=8)
class TwoStreams(Net):
    """Two streams through the same layers, with four adds on each. A sum of two streams reads both: the
    branches' inputs and the end push nothing."""

    layer = TwoStreamLayer

    def middle(self, x: Tensor) -> Tensor:
        context = x.flip(1)
        for layer in self.layers:
            x, context = layer(x, context)
        return x + context


class ReversibleLayer(Pair):
    def forward(self, a: Tensor, b: Tensor) -> State:
        a = a + self.f(b)
        b = b + self.g(a)
        return a, b


@PROGRAMS.net(pushes=9)
class Reversible(Net):
    """Two streams from one source, each the input of the other's branches: four pushes on each, and their sum."""

    layer = ReversibleLayer

    def middle(self, x: Tensor) -> Tensor:
        a = b = x
        for layer in self.layers:
            a, b = layer(a, b)
        return a + b


class DictLayer(Block):
    def forward(self, state: dict[str, Tensor | None]) -> dict[str, Tensor | None]:  # type: ignore[override]
        x = state["x"]
        assert x is not None
        return {"x": super().forward(x), "mask": state["mask"]}


@PROGRAMS.net(pushes=8)
class DictState(Net):
    """The stream travels in a dict: two pushes in each of four."""

    layer = DictLayer

    def middle(self, x: Tensor) -> Tensor:
        state = {"x": x, "mask": None}
        for layer in self.layers:
            state = layer(state)
        assert state["x"] is not None
        return state["x"]


class TupleLayer(Pair):
    def forward(self, x: Tensor) -> State:
        x = x + self.f(x)
        y = self.g(x)
        return x + y, y.abs().mean()


@PROGRAMS.net(pushes=9)
class TupleState(Net):
    """A layer returns the stream and a number, and the numbers are added at the end: eight pushes and a broadcast."""

    layer = TupleLayer

    def middle(self, x: Tensor) -> Tensor:
        total: Tensor | float = 0.0
        for layer in self.layers:
            x, number = layer(x)
            total = total + number
        return x + total


class ValueLayer(Pair):
    def forward(self, x: Tensor, first: Tensor | None = None) -> State:
        value = self.f(x)
        first = value if first is None else first
        x = x + 0.5 * (value + first)
        return x + self.g(x), first


@PROGRAMS.net(pushes=8)
class ValueResidual(Net):
    """The first layer's branch takes part in all later ones: two pushes in each of four."""

    layer = ValueLayer

    def middle(self, x: Tensor) -> Tensor:
        first = None
        for layer in self.layers:
            x, first = layer(x, first)
        return x
