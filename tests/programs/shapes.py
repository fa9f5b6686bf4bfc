"""Streams that change on the way: their layout, their length, their width; and what starts and ends them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.parts import CLASSES, WIDTH, Block, Branch, Collection, Net

PROGRAMS = Collection()


@PROGRAMS.net(pushes=8)
class NormInBetween(Net):
    """A norm in the loop after the second layer starts a new stream: two chains of four."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.LayerNorm(WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1:
                x = self.between(x)
        return x


@PROGRAMS.net(pushes=8)
class TokensPruned(Net):
    """Every other token goes after the second layer: a slice of all sources. Two pushes in each of four."""

    def middle(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1:
                x = x[:, ::2]
        return x


@PROGRAMS.net(pushes=8)
class LastOnFirstToken(Net):
    """The last layer sees the first token only: a slice of all sources. Two pushes in each of four."""

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.layers[-1](x[:, :1])


@PROGRAMS.net(pushes=8)
class MemoryTokens(Net):
    """Learned tokens are put before each layer's input and cut off after it; cat makes a new stream: four chains of
    two."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(1, 2, WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(torch.cat([self.memory.expand(len(x), -1, -1), x], 1))[:, 2:]
        return x


class WideBlock(Block):
    def __init__(self) -> None:
        super().__init__(2 * WIDTH)


@PROGRAMS.net(pushes=8)
class TwoWidths(Net):
    """Two stages of different width, with a projection between: two chains of four."""

    def __init__(self) -> None:
        super().__init__(2)
        self.widen = nn.Linear(WIDTH, 2 * WIDTH)
        self.wide_layers = nn.ModuleList(WideBlock() for _ in range(2))
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def middle(self, x: Tensor) -> Tensor:
        x = self.widen(super().middle(x))
        for layer in self.wide_layers:
            x = layer(x)
        return x


class ConvolutionLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(1, WIDTH) for _ in range(2))
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.point = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norms[0](x))
        return x + self.point(F.gelu(self.norms[1](x)))


@PROGRAMS.net(pushes=8)
class ChannelsFirst(Net):
    """Convolutions on [batch, width, length]: the features are not the last dimension. Two pushes in each of four."""

    layer = ConvolutionLayer

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(x.transpose(1, 2)).transpose(1, 2)


class ViewedLayer(ConvolutionLayer):
    def forward(self, x: Tensor) -> Tensor:
        batch, width, length = x.shape
        x = x + self.mix(self.norms[0](x))
        # Rows of features can be viewed in the layout of the sum alone.
        return x + self.point(F.gelu(x).view(batch * width, length).sigmoid().view(batch, width, length))


@PROGRAMS.net(pushes=8)
class ChannelsFirstViewed(ChannelsFirst):
    """An activation of the stream is viewed in the order in which its sum is stored. Two pushes in each of four."""

    layer = ViewedLayer

    def middle(self, x: Tensor) -> Tensor:
        return Net.middle(self, x.transpose(1, 2).contiguous()).transpose(1, 2)


class OtherStrides(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x.transpose(0, 1)).transpose(0, 1)
        return x.view(-1, WIDTH).view(x.shape) + self.g(x)


@PROGRAMS.net(pushes=8)
class BranchStrides(Net):
    """The sum is viewed after a branch with other strides. Two pushes in each of four."""

    layer = OtherStrides


class Window(Block):
    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        x = x + self.f(x)
        x = x.transpose(0, 1).contiguous().view(-1, width)
        x = x.view(length, batch, width).transpose(0, 1).contiguous().view(batch, -1, width)
        return x + self.g(x)


@PROGRAMS.net(pushes=8)
class Windows(Net):
    """The stream is permuted, made contiguous, and put back by a view. Two pushes in each of four."""

    layer = Window


@PROGRAMS.net(pushes=8)
class Selected(Net):
    """Data decide how many tokens the layers see, and where each of them was is added first. Two pushes in each of
    four."""

    def middle(self, x: Tensor) -> Tensor:
        chosen = x[..., 0] > 0
        places = chosen.nonzero()[:, 1].to(x.dtype)
        tokens = super().middle(0.5 * x[chosen] + places.view(-1, 1))
        return x.masked_scatter(chosen.unsqueeze(-1), tokens)


@PROGRAMS.net(pushes=8)
class RawOutput(Net):
    """The model returns the stream itself, with no norm and no head; the caller must get a tensor. Four times two."""

    def finish(self, x: Tensor) -> Tensor:
        return x


@PROGRAMS.net(pushes=8)
class FlatLoop(Net):
    """The whole loop runs on tokens flattened to [batch * length, width]: two pushes in each of four."""

    def middle(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return super().middle(x.reshape(batch * length, width)).view(batch, length, width)


@PROGRAMS.net(pushes=8)
class SplitStages(Net):
    """Two stacks with a head each, like two towers after a common embedding: two chains of four."""

    def __init__(self) -> None:
        super().__init__()
        self.second_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        start = self.embed(x)
        first = second = start
        for layer in self.layers[:2]:
            first = layer(first)
        for layer in self.layers[2:]:
            second = layer(second)
        return self.head(self.norm(first) * torch.sigmoid(self.second_norm(second)))


class FirstTokenLayer(nn.Module):
    """Attention of the first token to all, as in the last layers of CaiT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.branch = Branch()

    def forward(self, token: Tensor, patches: Tensor) -> Tensor:
        both = self.norm(torch.cat([token, patches], 1))
        token = token + self.attention(both[:, :1], both, both, need_weights=False)[0]
        return token + self.branch(token)


@PROGRAMS.net(pushes=8)
class ClassToken(Net):
    """A learned token, one for all samples, collects from a fixed sequence. Its stream is [batch, 1, width] and starts
    at a parameter that is expanded. Two pushes in each of four."""

    layer = FirstTokenLayer

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        token = self.token.expand(len(x), -1, -1)
        for layer in self.layers:
            token = layer(token, x)
        return token
