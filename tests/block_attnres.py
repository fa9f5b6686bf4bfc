"""Small transformers written as users write them, and Block AttnRes written by hand on top of them. For tests only."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres_compile.ops import reference

NormName = Literal["layer", "rms"]


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension with a learned weight, as many model codes define it themselves."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x [..., width]`."""
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix `x [batch, length, width]` over the length."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class MLP(nn.Module):
    """Two linear layers with GELU between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x [..., width]` to the same shape."""
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Layer(nn.Module):
    """A sequential pre-norm layer: two residual adds, so two sublayers."""

    def __init__(self, width: int, heads: int, norm: NormName) -> None:
        super().__init__()
        self.norm_1 = make_norm(norm, width)
        self.attention = Attention(width, heads)
        self.norm_2 = make_norm(norm, width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention, then the MLP, to `x [batch, length, width]`."""
        x = x + self.attention(self.norm_1(x))
        x = x + self.mlp(self.norm_2(x))
        return x

    def sublayers(self) -> list[Callable[[Tensor], Tensor]]:
        """What the two adds push, as functions of the state that they read."""
        return [lambda x: self.attention(self.norm_1(x)), lambda x: self.mlp(self.norm_2(x))]


class ParallelLayer(nn.Module):
    """Attention and MLP side by side on one norm: a state between the two adds is never read, so one sublayer."""

    def __init__(self, width: int, heads: int, norm: NormName) -> None:
        super().__init__()
        self.norm = make_norm(norm, width)
        self.attention = Attention(width, heads)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """Add both branches to `x [batch, length, width]`."""
        normed = self.norm(x)
        out: Tensor = x + self.attention(normed) + self.mlp(normed)
        return out

    def sublayers(self) -> list[Callable[[Tensor], Tensor]]:
        """What the layer pushes, as a function of the state that it reads."""

        def branches(x: Tensor) -> Tensor:
            normed = self.norm(x)
            out: Tensor = self.attention(normed) + self.mlp(normed)
            return out

        return [branches]


class PlainTransformer(nn.Module):
    """A pre-norm causal transformer with `layers` sequential layers: `2 * layers` sublayers."""

    layer_type: ClassVar[type[Layer] | type[ParallelLayer]] = Layer

    def __init__(
        self,
        *,
        layers: int = 3,
        width: int = 24,
        heads: int = 2,
        vocabulary: int = 31,
        length: int = 16,
        norm: NormName = "layer",
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(self.layer_type(width, heads, norm) for _ in range(layers))
        self.norm = make_norm(norm, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed `tokens [batch, length]` with their positions: `[batch, length, width]`."""
        out: Tensor = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[batch, length, vocabulary]` of `tokens [batch, length]`."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def sublayers(self) -> list[Callable[[Tensor], Tensor]]:
        """All that is pushed onto the residual stream, in order."""
        layers = [layer for layer in self.layers if isinstance(layer, Layer | ParallelLayer)]
        return [sublayer for layer in layers for sublayer in layer.sublayers()]


class ParallelTransformer(PlainTransformer):
    """The same with parallel layers: `layers` sublayers."""

    layer_type = ParallelLayer


class HandWrittenBlockAttnRes(nn.Module):
    """Block AttnRes over a transformer whose parameters it shares, as one would write it from the paper.

    Row r - 1 of `query` and `key_norm` `[L, width]` belongs to the state after r sublayers.
    """

    def __init__(self, model: PlainTransformer, blocks: Sequence[int], *, preserve: bool = True, eps: float = 1e-6):
        super().__init__()
        if sum(blocks) != len(model.sublayers()):
            raise ValueError(f"blocks {list(blocks)} do not add up to {len(model.sublayers())} sublayers")
        weight = model.head.weight
        self.model, self.blocks, self.preserve, self.eps = model, list(blocks), preserve, eps
        self.query = nn.Parameter(weight.new_zeros(sum(blocks), weight.shape[1]))
        self.key_norm = nn.Parameter(weight.new_ones(sum(blocks), weight.shape[1]))

    def read(self, row: int, sources: list[Tensor]) -> Tensor:
        """Depth attention over `sources`, with the parameters of `row`."""
        scale = float(len(sources)) if self.preserve else 1.0
        return reference.depth_attention(sources, self.query[row], self.key_norm[row], eps=self.eps, scale=scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[batch, length, vocabulary]` of `tokens [batch, length]`."""
        embedding = self.model.embed(tokens)
        finished, done, sublayers = [embedding], 0, self.model.sublayers()
        for size in self.blocks:
            first = sublayers[done]
            partial = first(embedding if done == 0 else self.read(done - 1, finished))
            done += 1
            for _ in range(size - 1):
                partial = partial + sublayers[done](self.read(done - 1, [*finished, partial]))
                done += 1
            finished.append(partial)
        logits: Tensor = self.model.head(self.model.norm(self.read(done - 1, finished)))
        return logits


def make_norm(name: NormName, width: int) -> nn.Module:
    """A LayerNorm or this file's RMSNorm."""
    return nn.LayerNorm(width) if name == "layer" else RMSNorm(width)


def randomise(model: HandWrittenBlockAttnRes, seed: int = 0) -> None:
    """Give all reads random queries and key norms, so that a wrong block boundary or row shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.query.copy_(torch.randn(model.query.shape, generator=generator))
        model.key_norm.copy_(1 + 0.3 * torch.randn(model.key_norm.shape, generator=generator))
