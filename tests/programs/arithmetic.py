"""The forms that the add itself takes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.parts import WIDTH, Branch, Collection, Net, Pair

PROGRAMS = Collection()


@PROGRAMS.layer(pushes=8)
class HelperMethod(Pair):
    """The residual waits in a variable, and a method adds it, on either side: two pushes in each of four."""

    def combine(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.add(a, b)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.combine(residual, self.f(x))
        residual = x
        return self.combine(self.g(x), residual)


@PROGRAMS.layer(pushes=8)
class InPlaceOperator(Pair):
    """x += f twice in each of four layers. The branches get clones: their gradients need what the add overwrites."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.f(x.clone())
        x += self.g(x.clone())
        return x


@PROGRAMS.layer(pushes=8)
class InPlaceMethod(Pair):
    """x = x.add_(f) twice in each of four layers: the result is bound again."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x = x.add_(self.f(x.clone()))
        return x.add_(self.g(x.clone()))


@PROGRAMS.layer(pushes=8)
class AddWithAlpha(Pair):
    """torch.add and Tensor.add with alpha: a push of alpha * f, two in each of four."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.add(x, self.f(x), alpha=0.5)
        return x.add(self.g(x), alpha=0.25)


@PROGRAMS.layer(pushes=8)
class SumOfPair(Pair):
    """sum([x, f]), twice in each of four layers. Python adds the 0 that sum starts with first: not a push."""

    def forward(self, x: Tensor) -> Tensor:
        middle: Any = sum([x, self.f(x)])
        end: Any = sum([middle, self.g(middle)])
        return end


class ProductLayer(nn.Module):
    """Two branches, each a norm and one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.v = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)


@PROGRAMS.layer(pushes=8)
class AddMM(ProductLayer):
    """torch.addmm on a stream flattened to [tokens, width], and back: two pushes of a product in each of four."""

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, WIDTH)
        x = torch.addmm(x, self.norms[0](x), self.v)
        x = torch.addmm(x, self.norms[1](x), self.w)
        return x.view(shape)


@PROGRAMS.layer(pushes=8)
class BAddBMM(ProductLayer):
    """torch.baddbmm and its method with the weight once for each sample: two pushes of a product in each of four."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.baddbmm(x, self.norms[0](x), self.v.expand(len(x), -1, -1))
        return x.baddbmm(self.norms[1](x), self.w.expand(len(x), -1, -1))


@PROGRAMS.layer(pushes=8)
class AddCMul(Pair):
    """torch.addcmul adds a gated branch: two pushes of gate * f in each of four."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.addcmul(x, self.gate, self.f(x))
        return torch.addcmul(x, self.gate, self.g(x))


@PROGRAMS.layer(pushes=8)
class Subtraction(Pair):
    """x - f is a push of -f: two in each of four."""

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.f(x)
        return torch.sub(x, self.g(x))


@PROGRAMS.layer(pushes=8)
class ParallelBranches(Pair):
    """x + f + g: two pushes in each of four, one sublayer, for nobody reads the state between them."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x) + self.g(x)


@PROGRAMS.layer(pushes=4)
class ParallelSumFirst(Pair):
    """The branches are summed before they meet the stream: one push in each of four."""

    def forward(self, x: Tensor) -> Tensor:
        return sum([self.f(x), self.g(x)]) + x


@PROGRAMS.layer(pushes=4)
class ParallelStack(Pair):
    """The branches are stacked and summed: one push in each of four."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([self.f(x), self.g(x)]).sum(0)


@PROGRAMS.layer(pushes=12)
class HalfSteps(Pair):
    """Half steps around a whole one: three pushes in each of four."""

    def __init__(self) -> None:
        super().__init__()
        self.h = Branch()

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.f(x)
        x = x + self.g(x)
        return x + 0.5 * self.h(x)


class ScaledResidual(nn.Module):
    """A residual wrapper with a factor for the branch and one for the input, as Conformer codes have it."""

    def __init__(self, branch: nn.Module, factor: float) -> None:
        super().__init__()
        self.branch, self.factor = branch, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(x) * self.factor + x * 1.0


@PROGRAMS.layer(pushes=12)
class HalfStepModules(nn.Module):
    """Half steps by wrapper modules, and a norm at the end of each layer: four chains of three pushes. The input's
    factor of 1.0 is a coefficient."""

    def __init__(self) -> None:
        super().__init__()
        residuals = (ScaledResidual(Branch(), factor) for factor in (0.5, 1.0, 0.5))
        self.steps = nn.Sequential(*residuals, nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(x)


@PROGRAMS.layer(pushes=8)
class RawGate(Pair):
    """The stream is read twice for one push, by the branch's norm and by a gate without one: two in each of four."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x) * torch.sigmoid(self.gate(x))
        return x + self.g(x)


@PROGRAMS.layer(pushes=8)
class ScaledSkip(Pair):
    """1.5 * x + f: the factor is a coefficient of all sources, and two pushes follow in each of four."""

    def forward(self, x: Tensor) -> Tensor:
        x = 1.5 * x + self.f(x)
        return 1.5 * x + self.g(x)


class Scales(Pair):
    """A learned factor for each add, of some shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(1 + 0.2 * torch.randn(shape)) for _ in range(2))


@PROGRAMS.layer(pushes=8)
class LearnedScales(Scales):
    """a * x + f with a learned number, as DeepNorm and per-layer lambdas have it: two pushes in each of four."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a * x + self.f(x)
        return x * self.b - self.g(x)


@PROGRAMS.layer(pushes=8)
class LearnedScalesOfOneElement(Scales):
    """The same with parameters of one element and an axis: the factor is a number still, and keeps the shape."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a * x + self.f(x)
        return self.g(x) + x * self.b


@PROGRAMS.layer(pushes=8)
class SubsetDepth(Pair):
    """Stochastic depth for a part of the batch: train mode adds by index_add, which reads; eval mode has two ordinary
    pushes in each of four."""

    def residual(self, x: Tensor, branch: nn.Module) -> Tensor:
        if not self.training:
            return x + branch(x)
        batch = x.shape[0]
        kept = torch.randperm(batch)[: max(1, batch // 2)]
        added = branch(x[kept]).flatten(1)
        return torch.index_add(x.flatten(1), 0, kept, added, alpha=batch / len(kept)).view_as(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.residual(x, self.f)
        return self.residual(x, self.g)


@PROGRAMS.layer(pushes=8)
class StreamDropout(Pair):
    """Dropout on the stream itself: nothing in eval, where two pushes in each of four are left."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x + self.f(x), 0.1, self.training)
        return F.dropout(x + self.g(x), 0.1, self.training)


@PROGRAMS.net(pushes=8)
class DividedByBatch(Net):
    """x / len(x) after each layer: a coefficient that depends on the input's shape. Two pushes in each of four."""

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x / len(x)
        return x
