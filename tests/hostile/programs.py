"""Random residual programs: modules whose forward does one odd thing after another to a few residual streams.

A program is data, so that a failing one prints itself and can be cut down: a root body, whose steps call layers, and
the layers' bodies. A body works on registers: its inputs, then the result of each step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.hostile.operations import ADDS, ANY, BATCH, CALM, OPS, TOKENS, WIDTH


@dataclass(frozen=True)
class Step:
    """One operation: its name and the registers that it takes."""

    op: str
    of: tuple[int, ...]


@dataclass(frozen=True)
class Body:
    """A forward: so many inputs, steps, and the registers that it returns, in a container of some kind."""

    inputs: int
    steps: tuple[Step, ...]
    returns: tuple[int, ...]
    container: str = "tuple"


@dataclass(frozen=True)
class Program:
    """A model: ``call <i>`` among the root's steps calls ``layers[i]``, which may be called more than once."""

    root: Body
    layers: tuple[Body, ...] = ()
    block_size: int = 1


class Model(nn.Module):
    """A body as a module; the root holds the layers."""

    def __init__(self, body: Body, layers: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.body = body
        self.layers = nn.ModuleList(layers)
        makers = {str(i): OPS[step.op].make for i, step in enumerate(body.steps) if step.op in OPS}
        self.parts = nn.ModuleDict({name: make() for name, make in makers.items() if make is not None})

    def execute(self, *inputs: Tensor) -> Any:
        """Run the steps."""
        values = list(inputs)
        for i, step in enumerate(self.body.steps):
            operands = [values[j] for j in step.of]
            if step.op.startswith("call "):
                values.extend(opened(self.layers[int(step.op[5:])](*operands)))
            else:
                part = [self.parts[str(i)] if OPS[step.op].make is not None else None]
                values.append(OPS[step.op].run(*part, *operands))
        return contained(self.body.container, [values[j] for j in self.body.returns])


class One(Model):
    """A body of one input."""

    def forward(self, x: Tensor) -> Any:
        return self.execute(x)


class Two(Model):
    """A body of two inputs."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.execute(x, y)


def contained(container: str, values: list[Tensor]) -> Any:
    if container == "dict":
        return {str(i): value for i, value in enumerate(values)}
    if container == "list":
        return values
    return values[0] if len(values) == 1 else tuple(values)


def opened(output: Any) -> Sequence[Tensor]:
    if isinstance(output, dict):
        return list(output.values())
    return output if isinstance(output, list | tuple) else (output,)


KINDS = {1: One, 2: Two}


def build(program: Program) -> nn.Module:
    """The program as a model in double precision, with parameters of its own seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [KINDS[body.inputs](body) for body in program.layers]
        return KINDS[program.root.inputs](program.root, layers).double().eval()


def inputs(program: Program, batch: int = BATCH) -> tuple[Tensor, ...]:
    """Fresh inputs of the root."""
    generator = torch.Generator().manual_seed(batch)
    shape = (batch, TOKENS, WIDTH)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(program.root.inputs))


class _Writer:
    """Draws a body step by step, with the kind of each register."""

    def __init__(self, draw: Callable[..., Any], kinds: Sequence[str], calm: bool) -> None:
        self.draw, self.kinds, self.steps = draw, list(kinds), list[Step]()
        self.inputs, self.calm = len(kinds), calm
        self.stream = len(kinds) - 1

    def step(self, op: str, *of: int) -> int:
        """Append a step; the register of its result."""
        kind = self.kinds[of[0]]
        self.steps.append(Step(op, of))
        self.kinds.append(OPS[op].changes.get(kind, kind))
        return len(self.kinds) - 1

    def pick(self, kind: str) -> int:
        """A register of this kind, most likely a late one."""
        found = [i for i, k in enumerate(self.kinds) if k == kind]
        return found[-1 - self.draw(st.integers(0, min(3, len(found) - 1)))]

    def sublayer(self) -> None:
        """What a decent layer does: read the stream, push a branch."""
        kind = self.kinds[self.stream]
        # Autograd forbids to change in place what a branch has read.
        name = "channel branch" if kind == "bdt" else "branch" if self.calm else "branch of a copy"
        branch = self.step(name, self.stream)
        add = self.draw(st.sampled_from(ADDS[:-2] if self.calm else ADDS))
        self.stream = self.step(add, self.stream, branch)

    def odd(self) -> None:
        """Any operation on any registers."""
        last = self.kinds[self.stream]
        kind = last if self.draw(st.integers(0, 3)) else self.draw(st.sampled_from(sorted(set(self.kinds))))
        name = self.draw(st.sampled_from(CALM[kind] if self.calm else ANY[kind]))
        op = OPS[name]
        first = self.stream if self.kinds[self.stream] == kind and self.draw(st.booleans()) else self.pick(kind)
        result = self.step(name, first, *(self.pick(kind) for _ in range(op.arity - 1)))
        if self.draw(st.integers(0, 2)):
            self.stream = result

    def body(self, container: str) -> Body:
        """What was drawn, returning the stream and now and then another register."""
        returns = [self.stream]
        if not self.draw(st.integers(0, 4)):
            returns.append(self.draw(st.integers(0, len(self.kinds) - 1)))
        return Body(self.inputs, tuple(self.steps), tuple(returns), container)

    def fill(self, most: int) -> None:
        """Draw up to so many steps."""
        for _ in range(self.draw(st.integers(1, most))):
            if self.draw(st.integers(0, 9)) < 6:
                self.sublayer()
            else:
                self.odd()


@st.composite
def programs(draw: Callable[..., Any]) -> Program:
    """Any program."""
    calm = draw(st.integers(0, 3)) > 0
    layers: list[tuple[Body, list[str]]] = []
    for _ in range(draw(st.integers(0, 2))):
        writer = _Writer(draw, ["btd"] * draw(st.sampled_from([1, 1, 2])), calm)
        writer.fill(4)
        body = writer.body(draw(st.sampled_from(["tuple", "list", "dict"])))
        layers.append((body, [writer.kinds[i] for i in body.returns]))
    root = _Writer(draw, ["btd"] * draw(st.sampled_from([1, 1, 1, 2])), calm)
    if draw(st.booleans()):
        root.stream = root.step("linear module", root.stream)
    for _ in range(draw(st.integers(2, 5))):
        if layers and draw(st.integers(0, 3)):
            index = draw(st.integers(0, len(layers) - 1))
            body, kinds = layers[index]
            if root.kinds[root.stream] == "btd":
                root.steps.append(
                    Step(f"call {index}", (root.stream, *(root.pick("btd") for _ in range(body.inputs - 1))))
                )
                root.stream = len(root.kinds)
                root.kinds.extend(kinds)
        else:
            root.fill(2)
    if draw(st.booleans()) and root.kinds[root.stream] != "bdt":
        root.stream = root.step(draw(st.sampled_from(["norm module", "linear module", "rms by hand"])), root.stream)
    return Program(root.body("tuple"), tuple(body for body, _ in layers), draw(st.integers(1, 3)))
