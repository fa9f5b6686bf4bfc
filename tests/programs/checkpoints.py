"""Activation checkpointing, in its non-reentrant form; the reentrant one is among the hostile programs."""

from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.programs.parts import DEPTH, Block, Collection, Net, Pair

PROGRAMS = Collection()


@PROGRAMS.net(pushes=8)
class CheckpointedLayers(Net):
    """Each layer runs in a checkpoint: two pushes in each of four."""

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@PROGRAMS.net(pushes=8)
class CheckpointedSequence(Net):
    """checkpoint_sequential runs the layers in two segments: two pushes in each of four."""

    def __init__(self) -> None:
        super().__init__(0)
        self.stack = nn.Sequential(*(Block() for _ in range(DEPTH)))

    def middle(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.stack, 2, x, use_reentrant=False)


@PROGRAMS.layer(pushes=8)
class CheckpointedBranches(Pair):
    """A layer checkpoints its branches, not its adds: two pushes in each of four."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(self.f, x, use_reentrant=False)
        return x + checkpoint(self.g, x, use_reentrant=False)


@PROGRAMS.net(pushes=8)
class CheckpointedLambdas(Net):
    """Each layer runs in a checkpoint behind a lambda: two pushes in each of four."""

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: layer(y), x, use_reentrant=False)
        return x


class OptionalLayer(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.checkpointed = True

    def inner(self, x: Tensor, scale: float) -> Tensor:
        x = x + scale * self.f(x)
        return x + self.g(x)

    def forward(self, x: Tensor) -> Tensor:
        inner = partial(self.inner, scale=0.5)
        if self.checkpointed and self.training:
            return checkpoint(inner, x, use_reentrant=False)
        return inner(x)


@PROGRAMS.net(pushes=8)
class CheckpointedInTraining(Net):
    """A layer checkpoints a partial of its own method, but in train mode only: two pushes in each of four."""

    layer = OptionalLayer
