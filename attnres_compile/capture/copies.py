"""A copy of a model that shares its parameters, so that nothing done to the copy is seen on the original."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, TensorArgument

from attnres_compile.errors import RefusedError


def shared_copy(model: nn.Module) -> nn.Module:
    """Copy every module, hook, buffer and attribute; the parameters are the original's own.

    Raises:
        RefusedError: something in the model cannot be copied.
    """
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise RefusedError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}); analysis and verification run "
            "on a copy, so make the attribute at fault deep-copyable (a tensor with a graph: detach it)"
        ) from error


def program_with(
    program: ExportedProgram,
    module: fx.GraphModule,
    signature: ExportGraphSignature | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> ExportedProgram:
    """An exported program with another graph; the weights are shared.

    Args:
        program: it is left as it is.
        module: the graph.
        signature: the graph's own, whose outputs get the names that they have in the graph; None for the program's.
        state: what the graph needs beside the program's parameters and buffers.
    """
    signature = signature or copy.deepcopy(program.graph_signature)
    # A copied node that is called like a builtin, as an input may be, was renamed by fx.
    for node, given in zip(module.graph.find_nodes(op="placeholder"), signature.input_specs, strict=True):
        node.name = given.arg.name
    outputs: Any = module.graph.output_node().args[0]
    for node, returned in zip(outputs, signature.output_specs, strict=True):
        if isinstance(returned.arg, TensorArgument) and isinstance(node, fx.Node):
            returned.arg.name = node.name
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=signature,
        state_dict={**program.state_dict, **(state or {})},
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )
