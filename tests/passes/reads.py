"""Graphs with plain reads for the tests of the passes over them, and what has to stay equal."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from attnres_compile.ops import _library
from attnres_compile.passes._emit import STAMP
from attnres_compile.passes.base import Pass, run
from tests.passes.models import WIDTH
from tests.passes.tracing import example, exported, subject
from tests.tolerances import assert_close

EPS = 1e-3
OPS = torch.ops.attnres_compile
Body = Callable[[Any, Tensor], Sequence[Tensor]]
Graph = tuple[fx.GraphModule, list[Any]]
# Block sizes of five sublayers: Full AttnRes, groups of two and three, uneven ones, and one block of all.
SIZES = ((1, 1, 1, 1, 1), (2, 2, 1), (3, 2), (1, 3, 1), (1, 4), (5,))


def read(sources: Sequence[Tensor], query: Tensor, key_norm: Tensor | None, scale: float | None = None) -> Tensor:
    scale = float(len(sources)) if scale is None else scale
    result: Tensor = OPS.depth_attention.default(list(sources), query, key_norm, EPS, scale)
    return result


class Plain(nn.Module):
    """Block AttnRes by hand: each sublayer is a norm and a weight, and each state but the first is a plain read."""

    def __init__(
        self,
        sizes: Sequence[int],
        norm: Callable[[], nn.Module] = lambda: nn.LayerNorm(WIDTH),
        *,
        key_norm: bool = True,
    ) -> None:
        super().__init__()
        self.sizes, reads = tuple(sizes), sum(sizes)
        self.query = nn.Parameter(torch.randn(reads, WIDTH))
        self.key_norm = nn.Parameter(1 + torch.randn(reads, WIDTH) / 4) if key_norm else None
        self.norms = nn.ModuleList(norm() for _ in range(reads + 1))
        self.weights = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(reads))

    def forward(self, x: Tensor) -> Tensor:
        finished, state, row = [x], x, 0
        for size in self.sizes:
            partial = None
            for _ in range(size):
                branch = self.weights[row](self.norms[row](state))
                partial = branch if partial is None else partial + branch
                key_norm = None if self.key_norm is None else aten_row(self.key_norm, row)
                state = read([*finished, partial], aten_row(self.query, row), key_norm)
                row += 1
            assert partial is not None
            finished.append(partial)
        result: Tensor = self.norms[row](state)
        return result


class Reading(nn.Module):
    """What a body reads with the rows of `query` and `key_norm`."""

    def __init__(self, body: Body, rows: int = 4) -> None:
        super().__init__()
        self.body = body
        self.query, self.key_norm = (nn.Parameter(torch.randn(rows, WIDTH)) for _ in range(2))

    def row(self, i: int) -> tuple[Tensor, Tensor]:
        return aten_row(self.query, i), aten_row(self.key_norm, i)

    def forward(self, x: Tensor) -> list[Tensor]:
        return list(self.body(self, x))


def aten_row(matrix: Tensor, row: int) -> Tensor:
    """A row as streams take it, in every front end's graph."""
    return torch.ops.aten.select.int(matrix, 0, row)


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    """A module whose parameters are all away from ones and zeros."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        module = make().to(dtype)
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return module


def graph(model: nn.Module, *inputs: Tensor, front_end: str = "export") -> Graph:
    """The graph of a model, and a value per placeholder."""
    dtype = next((p.dtype for p in model.parameters()), torch.float64)
    inputs = inputs or (example(2, 3, WIDTH).to(dtype),)
    if front_end == "export":
        found = exported(model, *inputs)
        return found.module, found.inputs
    graphs: list[Graph] = []

    def backend(module: fx.GraphModule, values: list[Any]) -> Any:
        graphs.append((module, values))
        return module.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    ((module, values),) = graphs
    for node in module.graph.nodes:
        if "example_value" in node.meta:
            node.meta["val"] = node.meta["example_value"]
    return module, values


def outcome(found: Graph) -> dict[str, Tensor]:
    """Outputs, and the gradients of every input, by name."""
    module, inputs = found
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    values: dict[str, Any] = dict(zip(names, inputs, strict=True))
    for name, value in values.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            values[name] = value.detach().clone().requires_grad_()
    outputs = [o for o in pytree.tree_leaves(module(*values.values())) if isinstance(o, Tensor)]
    wanted = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad}
    result = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    loss = sum(projected(output, i) for i, output in enumerate(outputs) if output.requires_grad)
    if isinstance(loss, Tensor):
        found_grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        result |= {n: g for n, g in zip(wanted, found_grads, strict=True) if g is not None}
    return result


def projected(output: Tensor, seed: int) -> Tensor:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))
    return (output * weights.to(output.dtype)).sum()


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Outputs and gradients of the same names, dtypes and values."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert_close(actual[name], tensor, name)


def check(found: Graph, *passes: Pass) -> fx.GraphModule:
    """Run passes over a graph: equal outcome and dtypes, marked nodes, and nothing left to do."""
    module, _ = found
    expected, old = outcome(found), set(module.graph.nodes)
    run(passes, subject(module))
    assert_same(outcome(found), expected)
    new = [node for node in module.graph.nodes if node not in old]
    assert all(STAMP in node.meta for node in new)
    text = str(module.graph)
    assert [step(subject(module)) for step in passes] == [False] * len(passes)
    assert str(module.graph) == text
    return module


def untouched(found: Graph, step: Pass) -> None:
    """A pass that has nothing to do says so, and leaves the graph as it is."""
    text = str(found[0].graph)
    assert not step(subject(found[0]))
    assert str(found[0].graph) == text


def count(module: fx.GraphModule) -> dict[str, int]:
    """How often each of this library's operators is there."""
    targets = [node.target for node in module.graph.nodes if node.target in _library.IMPLEMENTATIONS]
    names = [target.name().rpartition(":")[2] for target in targets]
    return {name: names.count(name) for name in dict.fromkeys(names)}
