"""Stands in for torch_tensorrt: its registry, its lowering passes and its context, as far as a converter meets them.

The names and the order of calls are those of torch_tensorrt 2.13; `tensorrt.plugin` is NVIDIA's own. Run as a module,
a process of its own: it converts the reads of an exported model as torch_tensorrt does and prints the layers as JSON.
"""

import json
import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from attnres_compile.exporters import torch_tensorrt as adapter
from tests.exporters import tensorrt_stand_in
from tests.exporters.onnx_material import WIDTH, TwoPhase, tokens

CONVERSION, LOWERING = "torch_tensorrt.dynamo.conversion", "torch_tensorrt.dynamo.lowering.passes"


class Converters(dict[Any, Any]):
    def register(self, target: Any, *, supports_dynamic_shapes: bool = False) -> Any:
        assert target not in self
        assert supports_dynamic_shapes
        return lambda converter: self.setdefault(target, converter)


class Passes(list[Any]):
    def add_pass_with_index(self, step: Any, index: int | None = None) -> None:
        assert index is None
        self.append(step)


class Layer:
    def __init__(self, network: "Network", inputs: list[Any], plugin: Any) -> None:
        self.network, self.inputs, self.plugin, self.name = network, inputs, plugin, ""

    def get_output(self, index: int) -> Any:
        return self.network.tensor(f"{self.name} {index}")


class Network:
    def __init__(self, trt: Any) -> None:
        self.trt, self.layers = trt, list[Layer]()

    def tensor(self, name: str) -> Any:
        made = self.trt.ITensor()
        made.name = name
        return made

    def add_plugin(self, made: Any, aot: bool) -> Layer:
        assert aot
        self.layers.append(Layer(self, *self.instance(made)))
        return self.layers[-1]

    def instance(self, made: Any) -> tuple[list[Any], Any]:
        inputs, shapes, plugin = made(self.trt.QuickPluginCreationRequest.STRICT_AOT)
        assert not shapes
        return inputs, plugin


class Context:
    def __init__(self, trt: Any) -> None:
        self.net = Network(trt)


def get_trt_tensor(ctx: Context, value: Any, name: str) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return ctx.net.tensor(f"{tuple(value.shape)} {value.dtype}")
    assert isinstance(value, ctx.net.trt.ITensor), value
    return value


def install() -> tuple[Converters, Passes]:
    converters, passes = Converters(), Passes()
    contents: dict[str, dict[str, Any]] = {
        f"{CONVERSION}._ConverterRegistry": {
            "DYNAMO_CONVERTERS": converters,
            "dynamo_tensorrt_converter": converters.register,
        },
        f"{CONVERSION}.converter_utils": {"get_trt_tensor": get_trt_tensor},
        f"{LOWERING}._aten_lowering_pass": {"ATEN_PRE_LOWERING_PASSES": passes},
    }
    for name, values in contents.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update(values)
    return converters, passes


def exported() -> tuple[TwoPhase, ExportedProgram]:
    model = TwoPhase(key_norm=False).eval()
    shapes = {"tokens": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}
    return model, torch.export.export(model, (tokens(2, 5),), dynamic_shapes=shapes, strict=False)


def main() -> None:
    trt = tensorrt_stand_in.install()
    converters, passes = install()
    adapter.register_converters()
    adapter.register_converters()
    model, program = exported()
    for step in passes:
        step(program.graph_module, None)
    program = program.run_decompositions()
    actual = program.module()(tokens(3, 4))
    context, values = Context(trt), dict[torch.fx.Node, Any]()
    for node in program.graph.nodes:
        # Vectors have been folded to constants.
        vector = "val" in node.meta and isinstance(node.meta["val"], Tensor) and node.meta["val"].dim() == 1
        values[node] = torch.empty(WIDTH) if vector else context.net.tensor(node.name)
        if node.target in converters:
            args = torch.fx.node.map_arg(node.args, values.__getitem__)
            values[node] = converters[node.target](context, node.target, args, node.kwargs, node.name)
    print(
        json.dumps(
            {
                "error": float((actual - model.by_reference(tokens(3, 4))).abs().max()),
                "operators": sorted({str(n.target) for n in program.graph.nodes if "attnres_compile" in str(n.target)}),
                "passes": len(passes),
                "layers": [
                    {
                        "name": layer.name,
                        "plugin": f"{layer.plugin.plugin_namespace}::{layer.plugin.plugin_name}",
                        "attributes": layer.plugin.attrs,
                        "inputs": [value.name for value in layer.inputs],
                    }
                    for layer in context.net.layers
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
