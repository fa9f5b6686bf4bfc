"""Stands in for TensorRT's native module: as much of it as NVIDIA's own `tensorrt.plugin` needs, and what a builder
asks a plugin for. The Python of `tensorrt.plugin` is the real one, from the wheel tensorrt-cu13-bindings.
"""

import enum
import importlib
import importlib.util
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

BINDINGS = "tensorrt_bindings"
ENUMS = {
    "DataType": "FLOAT HALF INT8 INT32 BOOL UINT8 FP8 BF16 INT64 INT4 FP4",
    "TensorFormat": "LINEAR CHW2 HWC8 CHW4 CHW16 CHW32 DHWC8 CDHW32 HWC DLA_LINEAR DLA_HWC4 HWC16 DHWC",
    "DimensionOperation": "SUM PROD MAX MIN SUB EQUAL LESS FLOOR_DIV CEIL_DIV",
    "PluginFieldType": "FLOAT16 FLOAT32 FLOAT64 INT8 INT16 INT32 CHAR DIMS UNKNOWN BF16 INT64 FP8 INT4 FP4",
    "PluginArgDataType": "INT8 INT16 INT32",
    "PluginArgType": "INT",
    "TensorRTPhase": "BUILD RUNTIME",
    "QuickPluginCreationRequest": "UNKNOWN PREFER_JIT PREFER_AOT STRICT_JIT STRICT_AOT",
}
INTERFACES = (
    "IPluginV3 IPluginV3QuickCore IPluginV3QuickBuild IPluginV3QuickRuntime IPluginV3QuickAOTBuild "
    "IPluginCreatorV3Quick ISymExpr ITensor IPluginCapability INetworkDefinition"
)
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "SUM": operator.add,
    "PROD": operator.mul,
    "SUB": operator.sub,
    "MAX": max,
    "MIN": min,
    "FLOOR_DIV": operator.floordiv,
    "CEIL_DIV": lambda a, b: -(-a // b),
}


@dataclass
class Size:
    """TensorRT's expression of a size: its value here, and whether it is known when the engine is built."""

    value: int
    constant: bool = True

    def is_constant(self) -> bool:
        return self.constant

    def get_constant_value(self) -> int:
        assert self.constant, "a dynamic size has no value"
        return self.value

    def is_size_tensor(self) -> bool:
        return False


class ExprBuilder:
    def constant(self, value: int) -> Size:
        return Size(int(value))

    def operation(self, kind: enum.Enum, a: Size, b: Size) -> Size:
        return Size(OPERATIONS[kind.name](a.value, b.value), a.constant and b.constant)


class Exprs(list[Any]):
    def __init__(self, sizes: Any) -> None:
        super().__init__([None] * sizes if isinstance(sizes, int) else sizes)


class Registry:
    def __init__(self) -> None:
        self.creators: dict[str, Any] = {}

    def register_creator(self, creator: Any, namespace: str = "") -> bool:
        name = f"{namespace}::{creator.name}"
        assert name not in self.creators
        self.creators[name] = creator
        return True

    def get_creator(self, name: str, version: str, namespace: str = "") -> Any:
        return self.creators.get(f"{namespace}::{name}")


@dataclass
class Field:
    name: str
    data: Any = None
    type: Any = None


@dataclass
class Desc:
    dims: tuple[int, ...] = ()
    type: Any = None
    format: Any = None
    scale: float = 1.0


@dataclass
class DynamicDesc:
    desc: Desc = field(default_factory=Desc)
    min: tuple[int, ...] = ()
    opt: tuple[int, ...] = ()
    max: tuple[int, ...] = ()


def found() -> bool:
    return importlib.util.find_spec(BINDINGS) is not None


def install() -> ModuleType:
    """Make `tensorrt` and the real `tensorrt.plugin` importable."""
    trt = ModuleType("tensorrt")
    values: Any = trt
    for name, members in ENUMS.items():
        setattr(trt, name, enum.Enum(name, members))
    for name in INTERFACES.split():
        setattr(trt, name, type(name, (), {"__init__": lambda self, *args, **kwargs: None}))
    for name, member in {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int32": "INT32"}.items():
        setattr(trt, name, values.DataType[member])
    for name in ("int8", "bool", "uint8", "fp8", "int64", "int4", "fp4"):
        setattr(trt, name, values.DataType[name.upper()])
    registry = Registry()
    values.Dims = type("Dims", (tuple,), {"MAX_DIMS": 8})
    values.DimsExprs, values.IDimensionExpr, values.IExprBuilder = Exprs, Size, ExprBuilder
    values.PluginTensorDesc, values.DynamicPluginTensorDesc = Desc, DynamicDesc
    values.PluginField, values.PluginFieldCollection = Field, list
    values.get_plugin_registry = lambda: registry
    values.Logger = type(
        "Logger", (), {"WARNING": 1, "Severity": SimpleNamespace(WARNING=1), "log": lambda *message: None}
    )
    values.nptype = lambda kind: np.dtype(kind.name.lower())
    spec = importlib.util.find_spec(BINDINGS)
    assert spec is not None and spec.origin is not None
    bindings = ModuleType(BINDINGS)
    # The package's own code would load libnvinfer.
    bindings.__path__ = [str(Path(spec.origin).parent)]
    values.__path__, values.__spec__ = [], ModuleSpec("tensorrt", None)
    values.plugin = ModuleType("tensorrt.plugin")
    sys.modules |= {"tensorrt": trt, BINDINGS: bindings, "tensorrt.plugin": values.plugin}
    plugin = importlib.import_module(f"{BINDINGS}.plugin")
    for name in dir(plugin):
        if not name.startswith("__"):
            setattr(values.plugin, name, getattr(plugin, name))
    return trt


def build(
    trt: Any, name: str, inputs: Sequence[tuple[Sequence[int | str], str]], attributes: dict[str, float], size: int = 7
) -> dict[str, Any]:
    """What a builder asks the plugin for, in its order, with `size` for every dynamic axis.

    Each input is its sizes, dynamic ones as text, and its type.
    """
    namespace, _, short = name.partition("::")
    creator = trt.get_plugin_registry().creators[name]
    fields = [Field(f.name, np.array([attributes[f.name]])) for f in creator.field_names]
    request = trt.QuickPluginCreationRequest.STRICT_AOT
    plugin = creator.create_plugin(short, namespace, fields, trt.TensorRTPhase.BUILD, request)
    types = [trt.DataType[kind] for _, kind in inputs]
    types_out = plugin.get_output_data_types(types, [len(sizes) for sizes, _ in inputs])
    sizes_in = [Exprs([Size(n) if isinstance(n, int) else Size(size, False) for n in sizes]) for sizes, _ in inputs]
    sizes_out = plugin.get_output_shapes(sizes_in, [], ExprBuilder())
    linear = trt.TensorFormat.LINEAR
    every = zip([*sizes_in, *sizes_out], [*types, *types_out], strict=True)
    tensors = [
        DynamicDesc(Desc(tuple(s.value if s.constant else -1 for s in sizes), kind, linear)) for sizes, kind in every
    ]
    count = len(inputs)
    combination = plugin.get_supported_format_combinations(tensors, count)
    assert [(d.type, d.format) for d in combination] == [(t.desc.type, t.desc.format) for t in tensors]
    plugin.configure_plugin(tensors[:count], tensors[count:])
    assert plugin.get_valid_tactics() == []
    plugin.set_tactic(0)
    launch = SimpleNamespace()
    extra: Any = type("Setter", (dict,), {"nbSymExprs": 0})()
    plugin.get_launch_params(sizes_in, tensors, count, launch, extra, ExprBuilder())
    kernel, code = plugin.get_kernel([t.desc for t in tensors[:count]], [t.desc for t in tensors[count:]])
    return {
        "plugin": short,
        "inputs": count,
        "types": [kind.name for kind in types_out],
        "sizes": [[s.value if s.constant else f"{s.value}?" for s in sizes] for sizes in sizes_out],
        "kernel": kernel,
        "code": code.decode(),
        "grid": launch.grid_x.expr.value,
        "threads": launch.block_x.expr.value,
        "shared": launch.shared_mem.expr.value,
        "extra": [extra[i].expr.value for i in range(extra.nbSymExprs)],
    }
