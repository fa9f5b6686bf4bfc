"""torch.compile and torch.export on top of a transformed model: one graph, every shape, random queries."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx

from tests.integration.models import QUERY, READS, SHAPES, Graphs, example, projection, run, transformed
from tests.tolerances import assert_close, relative_error
from tests.zoo import CASES


def call(name: str, batch: int, length: int) -> dict[str, Any]:
    """One forward without a cache."""
    inputs: dict[str, Any] = example(name, batch, length)
    return inputs | ({"use_cache": False} if name in {"llama", "gpt2"} else {})


def reads(graph: fx.Graph) -> int:
    """Reads in a graph, of either operator, that something depends on."""
    graph.eliminate_dead_code()
    names = Counter(str(node.target) for node in graph.nodes if node.op == "call_function")
    return sum(count for name, count in names.items() if "depth_attention" in name or "merge" in name)


# siglip's encoder puts its stream into a dataclass that asks for the first row.
@pytest.mark.parametrize("name", ["llama", "gpt2", "siglip_vision"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_one_graph_for_every_shape(name: str) -> None:
    """Outputs, gradients, and new queries: the parameters are inputs of the graph, not constants in it."""
    torch._dynamo.reset()
    model, backend = transformed(name), Graphs()
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    before = None
    for shape in SHAPES:
        inputs = call(name, *shape)
        found = []
        for each in (model, compiled):
            output = CASES[name].output(each(**inputs))
            found.append((output, torch.autograd.grad(projection(output), [model.get_parameter(QUERY)])[0]))
        assert_close(found[1][0], found[0][0], str(shape))
        assert_close(found[1][1], found[0][1], str(shape))
        before = found[0][0]
    with torch.no_grad():
        model.get_parameter(QUERY).neg_()
    after = CASES[name].output(compiled(**inputs))
    assert_close(after, run(name, model, inputs))
    assert before is not None
    assert relative_error(after, before) > 1e-3
    assert len(backend.found) == 1
    assert reads(backend.found[0].graph) == READS


@pytest.mark.parametrize("name", ["llama", "nanogpt", "siglip_vision"])
def test_export_with_dynamic_shapes(name: str) -> None:
    model = transformed(name).eval()
    inputs = call(name, *SHAPES[0])
    shapes = {key: CASES[name].dynamic.get(key) for key in inputs}
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False)
    assert reads(program.graph) == READS
    for shape in SHAPES:
        other = inputs | example(name, *shape)
        with torch.no_grad():
            assert_close(CASES[name].output(program.module()(**other)), run(name, model, other))
