"""Models of our own for the zoo, written as users write them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalAttention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.split = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        parts = self.split(x).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        return self.dropout(self.merge(y.transpose(1, 2).contiguous().view(batch, length, width)))


class GPTBlock(nn.Module):
    """The pre-norm block: x + attention, then x + mlp."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, dropout)
        self.norm_2 = nn.LayerNorm(width)
        mlp = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))
        self.mlp = nn.Sequential(*mlp)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        x = x + self.mlp(self.norm_2(x))
        return x


class NanoGPT(nn.Module):
    """A GPT as one writes it by hand: parts in a ModuleDict, learned positions, tied output weights."""

    def __init__(self, layers: int, vocab: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        embedding = nn.Embedding(vocab, width)
        self.transformer = nn.ModuleDict(
            {
                "tokens": embedding,
                "positions": nn.Embedding(64, width),
                "dropout": nn.Dropout(dropout),
                "blocks": nn.Sequential(*(GPTBlock(width, heads, dropout) for _ in range(layers))),
                "norm": nn.LayerNorm(width),
            }
        )
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        parts = self.transformer
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        x = parts["dropout"](parts["tokens"](input_ids) + parts["positions"](positions))
        for block in parts["blocks"].children():
            x = block(x)
        return self.head(parts["norm"](x))


class Bottleneck(nn.Module):
    """The residual block of a ResNet: the activation comes after the add, so the sum itself is not kept."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def stage(wide: int, out: int, size: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(wide, out, size, padding=size // 2, bias=False), nn.BatchNorm2d(out))

        middle = width // 2
        self.reduce, self.mix, self.expand = stage(width, middle, 1), stage(middle, middle, 3), stage(middle, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.expand(F.relu(self.mix(F.relu(self.reduce(x))))))


def resnet(layers: int, width: int) -> nn.Module:
    """A stem, bottlenecks of one width, average pooling and ten classes."""
    stem = (nn.Conv2d(3, width, 7, 4, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    blocks = (Bottleneck(width) for _ in range(layers))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def torch_encoder(layers: int, width: int, heads: int, dropout: float) -> nn.Module:
    """PyTorch's own encoder, norm first. In eval mode without gradients it takes a fused path that shows no adds."""
    layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
