"""What Python does between the adds: numbers from shapes, flags, counters, attributes, closures."""

import torch
from torch import Tensor, nn

from tests.programs.parts import WIDTH, Block, Collection, Net, Pair

PROGRAMS = Collection()


@PROGRAMS.layer(pushes=8)
class ShapeArithmetic(Pair):
    """int(w.shape[1] / 2) decides how a branch is rolled, which a trace would fix. Two pushes in each of four."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.f(x)
        half = int(w.shape[1] / 2)
        x = x + torch.cat([w[:, half:], w[:, :half]], 1)
        return x + self.g(x)


@PROGRAMS.layer(pushes=8)
class LengthOfBatch(Pair):
    """len(x) and x.size(0) as divisors, of what a branch reads and of what it gives. Two pushes in each of four."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x / len(x))
        return x + self.g(x) / x.size(0)


@PROGRAMS.layer(pushes=8)
class ShapeBranch(Pair):
    """An assertion and an if on the stream's shape: the test lengths fall on both sides. Two pushes in each of four."""

    def forward(self, x: Tensor) -> Tensor:
        _, length, width = x.shape
        assert width == WIDTH
        x = x + self.f(x)
        return x + (self.g(x) if length > 8 else 2 * self.g(x))


@PROGRAMS.layer(pushes=8)
class Counter(Pair):
    """Each call counts itself and weighs its branch by the count, so that no two calls agree. Compare fresh builds. Two
    pushes in each of four."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x + self.f(x)
        return x + self.g(x) * (1.0 / self.calls)


@PROGRAMS.layer(pushes=12)
class BufferWrite(Pair):
    """A running mean of the stream, which is bound to a buffer and added, broadcast: three pushes in each of four. No
    two calls agree: compare fresh builds."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return x + self.g(x) + self.mean


class KeepingLayer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.kept = x.detach()
        return x


@PROGRAMS.net(pushes=8)
class KeptOnModule(Net):
    """Layers leave their state on themselves, and the model weighs the stream by what it finds there: a coefficient.
    Two pushes in each of four."""

    layer = KeepingLayer

    def middle(self, x: Tensor) -> Tensor:
        x = super().middle(x)
        kept = torch.stack([layer.kept for layer in self.layers if isinstance(layer.kept, Tensor)])
        return x * (1 + 0.1 * torch.tanh(kept.mean()))


@PROGRAMS.layer(pushes=8)
class Closures(Pair):
    """Branches behind functions that are made in forward: two pushes in each of four."""

    def forward(self, x: Tensor) -> Tensor:
        def first(y: Tensor) -> Tensor:
            return self.f(y)

        def second() -> Tensor:
            return self.g(x)

        x = x + first(x)
        return x + second()


class FlagLayer(Pair):
    def weighted(self, branch: Tensor, weight: Tensor | None) -> Tensor:
        return branch if weight is None else weight * branch

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        x = x + self.weighted(self.f(x), weight)
        return x + self.g(x)


@PROGRAMS.net(pushes=8)
class NoneInHelper(Net):
    """An argument that is None for every other layer, and that only a helper method looks at. Two pushes in each of
    four."""

    layer = FlagLayer

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, self.weight if index % 2 else None)
        return x


@PROGRAMS.layer(pushes=8)
class TrainingInHelper(Pair):
    """A helper method reads the training flag, and draws a number in train mode. Two pushes in each of four."""

    def softened(self, branch: Tensor) -> Tensor:
        return branch * torch.rand(()) if self.training else branch * 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.softened(self.f(x))
        return x + self.softened(self.g(x))


@PROGRAMS.net(pushes=8)
class TypeChecks(Net):
    """The loop asks whether the stream is a tensor, of which rank, and casts it to the type it has. Two pushes in each
    of four."""

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            assert isinstance(x, Tensor)
            assert torch.is_tensor(x)
            assert x.ndim == x.dim() == 3
            assert x.is_floating_point()
            x = x.to(self.norm.weight.dtype).contiguous()
        return x


@PROGRAMS.net(pushes=8)
class AutocastInside(Net):
    """Embedding and layers run under bfloat16 autocast inside forward, so the stream is bfloat16 on the way. Two pushes
    in each of four."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.middle(self.embed(x))
        return self.finish(x.to(self.norm.weight.dtype))


class SwitchedLayer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.enabled else x


@PROGRAMS.net(pushes=6)
class SwitchedOff(Net):
    """Layers have a switch that may be turned later; one of four is off, the others push twice each."""

    layer = SwitchedLayer

    def __init__(self) -> None:
        super().__init__()
        layer = self.layers[1]
        assert isinstance(layer, SwitchedLayer)
        layer.enabled = False


@PROGRAMS.layer(pushes=8)
class GradModeInside(Pair):
    """One branch gets its input without gradient, in a region of its own. Two pushes in each of four."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        with torch.no_grad():
            y = x.tanh()
        return x + self.g(y)
