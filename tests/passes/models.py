"""Small models for the tests of the passes: one way to write a residual stream each."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


class Branch(nn.Module):
    """A norm and a weight."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Pair(nn.Module):
    """Two branches; subclasses say how they are added."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = Branch(), Branch()


class Block(Pair):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        return x + self.g(x)


class StreamFirst(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x) + self.g(x)


class StreamLast(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.g(x) + self.f(x) + x


class InPlace(Pair):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += self.f(x.clone())
        return x.add_(self.g(x.clone()))


class PostNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.linear(x))


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.linear(x))


class Squared(Activated):
    def forward(self, x: Tensor) -> Tensor:
        return (x + self.linear(x)).square()


class NormedAndKept(Activated):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear(x)
        return F.layer_norm(x, (WIDTH,)) * x


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class HandWrittenNorm(nn.Module):
    """The norm is a module of the user's own: two operations read the stream, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = RMSNorm(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class InlineNorm(nn.Module):
    """The norm is written out between the adds. Its mean is subtracted, and constant along the features."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return x + self.linear(centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.GroupNorm(1, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x))


class OverMaps(Branch):
    """A convolution over a map of the tokens, features first, then a sublayer over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        x = x.transpose(1, 2).view(batch, width, tokens, 1)
        x = x + self.mix(x)
        x = x.flatten(2).transpose(1, 2)
        return x + super().forward(x)


class ScaledSkip(Branch):
    """One weight a feature on the skip."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + super().forward(x)


class Gated(nn.Module):
    """Fused forms: a gate times a branch, and a product with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.addcmul(x, torch.sigmoid(self.weight[0, 0]), self.linear(self.norm(x)))
        return torch.baddbmm(x, self.norm(x), self.weight)


class Net(nn.Module):
    """An embedding, layers, and a norm; subclasses have another loop."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(layers or (Block(), Block()))
        self.norm = nn.LayerNorm(WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.middle(self.embed(x)))


class Shared(Net):
    """One block, visited three times."""

    def __init__(self) -> None:
        super().__init__(Block())

    def middle(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layers[0](x)
        return x


class Injected(Net):
    """The embedding again before each layer."""

    def middle(self, x: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            x = layer(x + first)
        return x


class TwoStreams(Net):
    """Two streams through layers of their own; the second starts at the first one's source."""

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(4)))

    def middle(self, x: Tensor) -> Tensor:
        a, b = x, x.flip(1)
        for layer in self.layers[:2]:
            a = layer(a)
        for layer in self.layers[2:]:
            b = layer(b)
        return a * b


class ChannelsFirst(Net):
    """The features are the second of three axes."""

    def __init__(self) -> None:
        super().__init__(*(Convolution() for _ in range(3)))

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(x.transpose(1, 2)).transpose(1, 2)


class OuterAdds(Net):
    """The adds are in the model's own loop; the stream's source is an output."""

    def __init__(self) -> None:
        super().__init__(Branch(), Branch(), Branch())

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + x
        return x


class OneFunction(nn.Module):
    """Source, adds and reads in one function, over `[..., WIDTH]`."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.3 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(x)
        for weight in self.weights:
            x = x + F.layer_norm(x, (WIDTH,)) @ weight
        return x
