"""What the programs share: how one is described, and the parts they are built from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import seeded

FEATURES, WIDTH, CLASSES, DEPTH = 5, 16, 7, 4

# phrases of refusals
NO_CHAIN = "no residual chain"
IN_PLACE = "in place"


@dataclass(frozen=True)
class Program:
    """One small model `[batch, length, 5] -> Tensor` with a residual stream written in some way of its own."""

    name: str
    build: Callable[[], nn.Module]
    """Makes the model from a seed, in eval mode."""
    pushes: int | None
    """`stream + f` events of one eval forward, over all chains; None where the program is refused."""
    refused: str | None
    """A phrase of the refusal's reason; None where the program is to be transformed."""
    note: str
    """What is odd about it, and how `pushes` comes about."""


class Branch(nn.Module):
    """An MLP with its own norm."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class RawBranch(nn.Module):
    """An MLP without a norm."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.tanh(self.up(x)))


class Pair(nn.Module):
    """Two branches `f` and `g`; subclasses say how they are added to the stream."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.f = Branch(width)
        self.g = Branch(width)


class Block(Pair):
    """The ordinary pre-norm block."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        return x + self.g(x)


class Net(nn.Module):
    """Embedding, layers, norm and head. Subclasses replace the layers' class, or the loop over them, or both."""

    layer: ClassVar[Callable[[], nn.Module]] = Block

    def __init__(self, depth: int = DEPTH, layer: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        make = layer or type(self).layer
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def middle(self, x: Tensor) -> Tensor:
        """The stream from the embedding to the final norm."""
        for layer in self.layers:
            x = layer(x)
        return x

    def finish(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.middle(self.embed(x)))


ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module])


class Collection(dict[str, Program]):
    """Programs by name. Its decorators add a class with its docstring as the note, and hand it back unchanged."""

    def net(self, *, pushes: int | None = None, refused: str | None = None) -> Callable[[ModuleClass], ModuleClass]:
        """Add a whole model."""

        def add(made: ModuleClass) -> ModuleClass:
            self._add(made, made, pushes, refused)
            return made

        return add

    def layer(self, *, pushes: int | None = None, refused: str | None = None) -> Callable[[ModuleClass], ModuleClass]:
        """Add an otherwise ordinary model with this class as its layers."""

        def add(made: ModuleClass) -> ModuleClass:
            self._add(made, lambda: Net(layer=made), pushes, refused)
            return made

        return add

    def _add(
        self, made: type[nn.Module], build: Callable[[], nn.Module], pushes: int | None, refused: str | None
    ) -> None:
        name, note = made.__name__, made.__doc__
        assert note, f"{name} has no docstring"
        assert (pushes is None) != (refused is None), f"{name} is either transformed or refused"
        self[name] = Program(name, lambda: seeded(build), pushes, refused, " ".join(note.split()))
