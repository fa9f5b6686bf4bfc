"""Programs that a transform has to refuse, each with the reason."""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.programs.parts import CLASSES, DEPTH, FEATURES, IN_PLACE, NO_CHAIN, WIDTH, Collection, Net, Pair

PROGRAMS = Collection()


@PROGRAMS.net(refused="reentrant")
class ReentrantCheckpoint(Net):
    """Layers in reentrant checkpoints: the forward would be exact, but most gradients would be lost."""

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if x.requires_grad else layer(x)
        return x


@PROGRAMS.net(refused="reentrant")
class ReentrantInTraining(Net):
    """As ReentrantCheckpoint, but in train mode only: eval mode shows nothing of it."""

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.training else layer(x)
        return x


@PROGRAMS.net(refused="ScriptModule")
class Scripted(Net):
    """Layers compiled by TorchScript, which takes tensors only."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.layers = nn.ModuleList(torch.jit.script(layer) for layer in self.layers)


@PROGRAMS.layer(refused=IN_PLACE)
class UnboundInPlace(Pair):
    """x.add_(f) for its effect alone: the name still means the older state."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(self.f(x.clone()))
        x.add_(self.g(x.clone()))
        return x


@PROGRAMS.layer(refused=IN_PLACE)
class AliasInPlace(Pair):
    """x += f while another name means the same tensor, and sees the new value."""

    def forward(self, x: Tensor) -> Tensor:
        alias = x
        x += self.f(x.clone())
        return x + self.g(alias)


@PROGRAMS.layer(refused="multiplied by a tensor")
class ScaledFeatures(Pair):
    """w * x + f with one weight per feature: depth attention would see other keys than the branches do."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.w = (nn.Parameter(1 + 0.2 * torch.randn(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.v * x + self.f(x)
        return self.w * x + self.g(x)


@PROGRAMS.layer(refused="multiplied by a tensor")
class Highway(Pair):
    """A gate for each feature weighs branch against stream, by products and by lerp: no state is kept as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        x = gate * self.f(x) + (1 - gate) * x
        return torch.lerp(x, self.g(x), 0.3)


@PROGRAMS.layer(refused=NO_CHAIN)
class PostNorm(Pair):
    """A norm after each add makes a new stream: every chain has one step."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](x + self.f(x))
        return self.norms[1](x + self.g(x))


@PROGRAMS.layer(refused=NO_CHAIN)
class ProjectedShortcut(Pair):
    """The first add of a layer is on a projection of the stream, not on the stream: every chain has one step."""

    def __init__(self) -> None:
        super().__init__()
        self.shortcut = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shortcut(x) + self.f(x)
        return x + self.g(x)


@PROGRAMS.net(refused="module boundary")
class OneFunction(nn.Module):
    """Source, adds and readers are in one forward over bare parameters: a chain of four that no module receives."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(FEATURES, WIDTH) * 0.4)
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.2 for _ in range(DEPTH))
        self.last = nn.Parameter(torch.randn(WIDTH, CLASSES) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.first
        for weight in self.weights:
            x = x + torch.tanh(F.layer_norm(x, (WIDTH,)) @ weight)
        return F.layer_norm(x, (WIDTH,)) @ self.last
