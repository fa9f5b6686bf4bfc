"""How layers are made, called, repeated and left out. The adds themselves are ordinary."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tests.programs.parts import DEPTH, Block, Branch, Collection, Net, Pair

PROGRAMS = Collection()


@PROGRAMS.net(pushes=8)
class SequentialBlocks(Net):
    """One nn.Sequential runs all layers: two pushes in each of four."""

    def __init__(self) -> None:
        super().__init__(0)
        self.stack = nn.Sequential(*(Block() for _ in range(DEPTH)))

    def middle(self, x: Tensor) -> Tensor:
        return self.stack(x)


class Residual(nn.Module):
    """Adds a branch to its input, as a wrapper."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return self.branch(x, **options) + x


@PROGRAMS.net(pushes=8)
class ResidualWrapper(Net):
    """Nested Sequentials of Residual(branch), four of two: eight pushes, each in a module of its own."""

    def __init__(self) -> None:
        super().__init__(0)
        layers = (nn.Sequential(Residual(Branch()), Residual(Branch())) for _ in range(DEPTH))
        self.stack = nn.Sequential(*layers)

    def middle(self, x: Tensor) -> Tensor:
        return self.stack(x)


@PROGRAMS.net(pushes=8)
class OuterAdds(Net):
    """The adds are in the model's own loop, over pairs of branches; only norms receive the source. Four times two."""

    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(nn.ModuleList([Branch(), Branch()]) for _ in range(DEPTH))

    def middle(self, x: Tensor) -> Tensor:
        for pair in self.layers:
            assert isinstance(pair, nn.ModuleList)
            f, g = pair
            x = f(x) + x
            x = g(x) + x
        return x


@PROGRAMS.layer(pushes=8)
class NestedGroup(nn.Module):
    """A layer that holds a ModuleList with one block and loops over it: two pushes in each of four."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@PROGRAMS.layer(pushes=8)
class WrappedBlock(nn.Module):
    """A layer that only hands on to an inner block: two pushes in each of four."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@PROGRAMS.layer(pushes=8)
class SuperCall(Block):
    """A subclass whose forward calls super().forward: two pushes in each of four."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@PROGRAMS.net(pushes=8)
class SharedBlock(Net):
    """One block, visited four times: each visit pushes twice and has reads of its own."""

    def __init__(self) -> None:
        super().__init__(1)

    def middle(self, x: Tensor) -> Tensor:
        for _ in range(DEPTH):
            x = self.layers[0](x)
        return x


@PROGRAMS.net(pushes=8)
class SharedAlternating(Net):
    """Two blocks that take turns for four visits of two pushes."""

    def __init__(self) -> None:
        super().__init__(2)

    def middle(self, x: Tensor) -> Tensor:
        for index in range(DEPTH):
            x = self.layers[index % 2](x)
        return x


@PROGRAMS.net(pushes=8)
class SharedRegistration(Net):
    """One block, registered under four names: four visits of two pushes."""

    def __init__(self) -> None:
        super().__init__(1)
        self.layers = nn.ModuleList([self.layers[0]] * DEPTH)


class KeywordLayer(Pair):
    def forward(self, *, hidden: Tensor, scale: float = 1.0) -> Tensor:
        hidden = hidden + scale * self.f(hidden)
        return hidden + self.g(hidden)


@PROGRAMS.net(pushes=8)
class KeywordCall(Net):
    """Layers take the stream by keyword only: two pushes in each of four."""

    layer = KeywordLayer

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(hidden=x)
        return x


class StarLayer(Pair):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x: Tensor = args[0]
        x = x + self.f(x)
        return x + self.g(x) if kwargs["flag"] else x


@PROGRAMS.net(pushes=8)
class StarCall(Net):
    """Layers take *args and **kwargs: two pushes in each of four."""

    layer = StarLayer

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, 1, flag=True)
        return x


@PROGRAMS.net(pushes=8)
class DirectForward(Net):
    """Layers are called through .forward, so that none of their hooks runs: the stream has to start elsewhere."""

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return x


@PROGRAMS.layer(pushes=8)
class DecoratedForward(Pair):
    """A forward under a decorator, and beside it a decorated method that nobody calls: two pushes in each of four."""

    @torch.no_grad()
    def unused(self) -> None:
        pass

    @torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        return x + self.g(x)


def louder(self: Block, x: Tensor) -> Tensor:
    x = x + 2 * self.f(x)
    return x + self.g(x)


@PROGRAMS.net(pushes=8)
class PatchedInstances(Net):
    """Each layer has a forward of its own as an instance attribute: two pushes in each of four."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.forward = MethodType(louder, layer)


def scale_output(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output * 1.5


@PROGRAMS.net(pushes=8)
class ForwardHooks(Net):
    """A hook of the user's scales each layer's output: a coefficient, and two pushes in each of four."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_hook(scale_output)


def shift_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] + 1,)


@PROGRAMS.net(pushes=12)
class ForwardPreHooks(Net):
    """A pre-hook of the user's adds 1 to each layer's input. Eight pushes of branches and four of 1: the
    user's hooks belong to the layer, which the stream enters before them."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_pre_hook(shift_input)


@PROGRAMS.layer(pushes=8)
class LayerDrop(Pair):
    """In train mode a layer drops itself half of the time; in eval two pushes in each of four."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.5:
            return x
        x = x + self.f(x)
        return x + self.g(x)


@PROGRAMS.net(pushes=8)
class LayerDropOuter(Net):
    """In train mode the loop leaves out half of the layers; in eval two pushes in each of four."""

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or torch.rand(()) > 0.5:
                x = layer(x)
        return x


@PROGRAMS.net(pushes=6)
class LayerSubset(Net):
    """The caller chooses which layers run and in which order, here three of four with two pushes each."""

    def __init__(self) -> None:
        super().__init__()
        self.order = (2, 0, 3)

    def middle(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


@PROGRAMS.net(pushes=8)
class EarlyExit(Net):
    """Without gradients the loop looks at the values and could stop early; here it never does. Four times two."""

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if not torch.is_grad_enabled() and float(x.abs().max()) > 1e6:
                break
        return x
