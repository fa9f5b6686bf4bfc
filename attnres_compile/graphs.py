"""Transform a graph: the rewritten GraphModule or ExportedProgram has the graph's own signature."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from attnres_compile.attach import ATTRIBUTE
from attnres_compile.capture.copies import program_with, shared_copy
from attnres_compile.capture.inputs import Inputs
from attnres_compile.capture.trace import Captured, from_graph, from_program
from attnres_compile.chains import ResidualChain
from attnres_compile.config import AttnResConfig
from attnres_compile.passes import _nodes
from attnres_compile.passes.base import Subject, run
from attnres_compile.passes.pipelines import GRAPH, OPTIMIZE
from attnres_compile.passes.rewrite_chains import Parameters, RewriteChains
from attnres_compile.reads import ChainReads, DepthReads


def analyse_graph(module: fx.GraphModule, inputs: Inputs, config: AttnResConfig) -> tuple[Captured, Subject]:
    """Chains and plans of a copy of a graph module."""
    copied = shared_copy(module)
    assert isinstance(copied, fx.GraphModule)
    captured = from_graph(copied, inputs)
    return captured, run(GRAPH, Subject(captured.module, config))


def analyse_program(program: ExportedProgram, config: AttnResConfig) -> tuple[Captured, Subject]:
    """Chains and plans of a copy of an exported program, functionalised where a chain's memory is changed in place."""
    captured, subject = _analyse(program, config)
    pushes = [push.node for chain in subject.chains for push in chain.pushes]
    memories = {_nodes.memory(node) for push in pushes for node in (push, *push.all_input_nodes)}
    changed = (_nodes.changed(node, subject.module) for node in subject.module.graph.nodes)
    if any(_nodes.memory(node) in memories for node in changed if node is not None):
        captured, subject = _analyse(program.run_decompositions({}), config)
    return captured, subject


def _analyse(program: ExportedProgram, config: AttnResConfig) -> tuple[Captured, Subject]:
    module = fx.GraphModule(program.graph_module, copy.deepcopy(program.graph_module.graph))
    captured = from_program(program, Inputs(*(program.example_inputs or ((), {}))), module)
    return captured, run(GRAPH, Subject(captured.module, config))


def rewrite_graph(subject: Subject) -> fx.GraphModule:
    """The graph module with its chains rewritten; the reads are its ``attnres``."""
    run((rewriting(subject),), subject)
    return subject.module


def rewriting(subject: Subject, reads_of: Callable[[ResidualChain], DepthReads] | None = None) -> RewriteChains:
    """The pass that rewrites the chains of a graph module and adds their reads to it.

    Args:
        subject: the module.
        reads_of: gives a chain its reads; None for new ones.
    """
    reads = ChainReads()
    subject.module.add_module(ATTRIBUTE, reads)

    def parameters(module: fx.GraphModule, chain: ResidualChain) -> Parameters:
        own = reads_for(chain, subject.config) if reads_of is None else reads_of(chain)
        reads.append(own)
        # Before the source, which may be an input itself.
        where = module.graph.inserting_before(next(iter(module.graph.nodes)))
        return parameter_nodes(own, chain, lambda name: module.graph.get_attr(name), where)

    return RewriteChains(parameters)


def pass_by_pass(captured: Captured, config: AttnResConfig) -> Iterator[tuple[str, str | None]]:
    """The name of each pass, in order, and the graph's text after it; None where the pass left the graph as it was."""
    subject = Subject(fx.GraphModule(captured.module, copy.deepcopy(captured.module.graph)), config)
    before = str(subject.module.graph)
    for step in (*GRAPH, rewriting(subject), *OPTIMIZE):
        run((step,), subject)
        after = str(subject.module.graph)
        yield type(step).__name__, None if after == before else after
        before = after


def rewrite_program(captured: Captured, subject: Subject) -> ExportedProgram:
    """The exported program with its chains rewritten; the reads are parameters ``attnres.<chain>.*`` of its state."""
    program = captured.program
    assert program is not None
    added: dict[str, tuple[fx.Node, Tensor]] = {}

    def parameters(module: fx.GraphModule, chain: ResidualChain) -> Parameters:
        reads = reads_for(chain, subject.config)
        first = next(iter(module.graph.nodes))

        def placeholder(name: str) -> fx.Node:
            node = module.graph.placeholder("p_" + name.replace(".", "_"))
            added[name] = (node, reads.get_parameter(name.rpartition(".")[2]))
            return node

        return parameter_nodes(reads, chain, placeholder, module.graph.inserting_before(first))

    run((RewriteChains(parameters),), subject)
    graph = subject.module.graph
    signature = copy.deepcopy(program.graph_signature)
    specs = [InputSpec(InputKind.PARAMETER, TensorArgument(name=node.name), name) for name, (node, _) in added.items()]
    # Later chains put their placeholders before those of earlier ones.
    order = {node.name: i for i, node in enumerate(graph.nodes)}
    signature.input_specs = [*sorted(specs, key=lambda spec: order[spec.arg.name]), *signature.input_specs]
    return program_with(program, subject.module, signature, {name: value for name, (_, value) in added.items()})


def reads_for(chain: ResidualChain, config: AttnResConfig) -> DepthReads:
    """New parameters for a planned chain, where and as its source is."""
    assert chain.plan is not None
    value = chain.source.meta["val"]
    return DepthReads(chain.plan.reads, chain.width, key_norm=config.key_norm, device=value.device, dtype=value.dtype)


def parameter_nodes(
    reads: DepthReads, chain: ResidualChain, make: Callable[[str], fx.Node], where: object
) -> Parameters:
    """Nodes for the parameters of a chain, which ``make`` makes by name at the place ``where`` in the graph."""
    assert chain.plan is not None
    made: list[fx.Node | None] = []
    with where:  # type: ignore[attr-defined]
        for name in ("query", "key_norm"):
            parameter = getattr(reads, name)
            if parameter is None:
                made.append(None)
                continue
            node = make(f"{ATTRIBUTE}.{chain.plan.chain}.{name}")
            node.meta["val"] = chain.source.meta["val"].fake_mode.from_tensor(parameter, static_shapes=True)
            made.append(node)
    query, key_norm = made
    assert query is not None
    return query, key_norm
