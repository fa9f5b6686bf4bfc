"""The depth-attention nodes as TensorRT plugins, whose kernels engines carry with them.

A plugin is ``tensorrt.plugin``'s "quickly deployable" kind with an ahead-of-time implementation: the builder asks for
PTX and launch parameters, and an engine runs without Python from then on. The PTX is that of ``tensorrt_kernels`` for
compute capability 8.0, which newer GPUs' drivers compile further. Importing this module needs nothing.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from attnres_compile.errors import ExportError, MissingDependencyError, OptionError
from attnres_compile.exporters.node_types import (
    DEPTH_ATTENTION,
    DOMAIN,
    FORMS,
    INTER_BLOCK,
    MERGE,
    depth_attention_name,
    inter_block_name,
    merge_norm_name,
    node_type,
)

# Parameters that Triton appends for scratch memory of its own, unused by these kernels.
_HIDDEN: Final = 2
_TYPES: Final = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16"}
_USUAL: Final = (
    MERGE,
    *(merge_norm_name(norm, add=add) for add in (False, True) for norm in ("rms", "layer")),
    *(depth_attention_name(n) for n in range(1, 34)),
    *(inter_block_name(n, s) for n in range(1, 34) for s in range(1, 9)),
)
# TensorRT's registry is one a process, and refuses a name that it has.
_registered: set[str] = set()


@dataclass(frozen=True)
class Ptx:
    """A kernel for TensorRT: its name, its PTX, and what a launch needs."""

    name: str
    code: str
    threads: int
    shared_bytes: int


def register_plugins(nodes: Iterable[str] | None = None) -> tuple[str, ...]:
    """Register the plugins of domain ``attnres_compile`` with TensorRT; its ONNX parser then prefers them.

    ``DepthAttentionN<n>``, ``InterBlockN<n>S<s>``, ``Merge``, and with a norm ``MergeRMSNorm``, ``MergeLayerNorm``,
    ``AddMergeRMSNorm`` and ``AddMergeLayerNorm``: inputs, outputs and attributes are those of the ONNX nodes. Sources,
    vectors and reads are fp32, fp16 or bf16, what phase 1 hands on is fp32. Call it before a model is parsed; what is
    registered already stays.

    Args:
        nodes: types of nodes, as ``OnnxExport.nodes`` has them. Each number of sources and of reads has a plugin of its
            own, since a plugin's signature is fixed. None: up to 33 sources and 8 reads.

    Returns:
        The names that were registered now.

    Raises:
        OptionError: a name is none of those.
        MissingDependencyError: ``tensorrt`` with ``tensorrt.plugin``, or Triton, is missing.
    """
    trtp = _tensorrt_plugin()
    wanted = [_plugin(trtp, name) for name in dict.fromkeys(_USUAL if nodes is None else nodes)]
    new = [plugin for plugin in wanted if plugin.name not in _registered]
    for plugin in new:
        plugin.register(trtp)
        _registered.add(plugin.name)
    return tuple(plugin.name for plugin in new)


def compile_ptx(kernel: str, types: Mapping[str, Any], constants: Mapping[str, Any], warps: int) -> Ptx:
    """Compile a kernel of ``tensorrt_kernels``, for the launch by TensorRT.

    Args:
        kernel: its name.
        types: type of each argument by name, as ``*fp16`` or ``i32``; a tuple of them for sources.
        constants: values of the constant arguments.
        warps: groups of 32 threads in a program.

    Raises:
        ExportError: the PTX has other parameters than the kernel, or uses one of Triton's own.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from attnres_compile.exporters import tensorrt_kernels

    function = getattr(tensorrt_kernels, kernel)
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    pointers = [path for path, kind in _leaves(signature) if kind.startswith("*")]
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs=dict(constants),
        # TensorRT's tensors begin at multiples of 256 bytes.
        attrs={path: [["tt.divisibility", 16]] for path in pointers},
    )
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True  # else an engine holds paths of this machine
        compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": warps})
    name, shared = compiled.metadata.name, compiled.metadata.shared
    count = sum(kind != "constexpr" for _, kind in _leaves(signature))
    return Ptx(name, without_hidden(compiled.asm["ptx"], count), 32 * warps, shared)


def without_hidden(ptx: str, count: int) -> str:
    """PTX whose kernel takes the first ``count`` parameters only.

    Raises:
        ExportError: it has not two more, or uses one of those.
    """
    entry = re.search(r"\.entry \w+\((.*?)\)", ptx, re.DOTALL)
    parameters = entry[1].split(",") if entry else []
    hidden = [re.findall(r"\w+$", parameter.strip())[0] for parameter in parameters[count:]]
    if entry is None or len(hidden) != _HIDDEN or any(ptx.count(name) != 1 for name in hidden):
        raise ExportError(
            f"Triton compiled a kernel of {count} arguments to PTX with {len(parameters)} parameters, of which "
            f"TensorRT would fill {count}; please report this with your version of Triton"
        )
    return ptx[: entry.start(1)] + ",".join(parameters[:count]) + "\n" + ptx[entry.end(1) :]


@dataclass(frozen=True)
class _Plugin:
    """A plugin: its inputs and attributes by name, and two functions of the inputs' descriptions.

    ``describe`` gives the descriptions of the outputs; ``implement`` takes the attributes' values too and gives PTX,
    the number of programs and the number of rows.
    """

    name: str
    inputs: tuple[str, ...]
    attributes: tuple[str, ...]
    outputs: int
    describe: Callable[..., Any]
    implement: Callable[[tuple[Any, ...], Mapping[str, float]], tuple[Ptx, Any, Any]]

    def register(self, trtp: Any) -> None:
        """Register it. TensorRT reads the signatures of the functions that it is given."""
        identity, desc = f"{DOMAIN}::{self.name}", trtp.TensorDesc
        result = desc if self.outputs == 1 else tuple[(desc,) * self.outputs]  # type: ignore[misc]

        def describe(*inputs: Any, **attributes: float) -> Any:
            return self.describe(*inputs)

        def implement(*arguments: Any) -> Any:
            *rest, _, _ = arguments  # without outputs and tactic
            inputs, values = tuple(rest[: len(self.inputs)]), rest[len(self.inputs) :]
            ptx, programs, rows = self.implement(inputs, dict(zip(self.attributes, values, strict=True)))
            launch = trtp.KernelLaunchParams()
            launch.grid_x, launch.block_x, launch.shared_mem = programs, ptx.threads, ptx.shared_bytes
            extra = trtp.SymIntExprs(1)
            extra[0] = trtp.SymInt32(rows)
            return ptx.name, ptx.code, launch, extra

        tensors, numbers = dict.fromkeys(self.inputs, desc), dict.fromkeys(self.attributes, float)
        text, launch = str | bytes, trtp.KernelLaunchParams
        built = tuple[text, text, launch, trtp.SymExprs]  # type: ignore[valid-type]
        _sign(describe, tensors | numbers, result)
        _sign(implement, tensors | numbers | {"outputs": inspect.Parameter.empty, "tactic": int}, built)
        trtp.register(identity)(describe)
        trtp.aot_impl(identity)(implement)


def _sign(function: Callable[..., Any], parameters: Mapping[str, Any], result: Any) -> None:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    listed = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in parameters.items()]
    function.__signature__ = inspect.Signature(listed, return_annotation=result)  # type: ignore[attr-defined]


def _plugin(trtp: Any, name: str) -> _Plugin:
    """The plugin of a type of node."""
    kind = node_type(name)
    if kind is None:
        raise OptionError(f"no plugin is called {name!r}; there are {FORMS}")
    if kind.operator == DEPTH_ATTENTION:
        return _depth_attention(trtp, kind.sources)
    if kind.operator == INTER_BLOCK:
        return _inter_block(trtp, kind.sources, kind.reads)
    return _merge(trtp) if kind.norm is None else _merge_norm(trtp, kind.norm, kind.add)


def _depth_attention(trtp: Any, n: int) -> _Plugin:
    def implement(inputs: tuple[Any, ...], values: Mapping[str, float]) -> tuple[Ptx, Any, Any]:
        query, key_norm, *sources = inputs
        d, rows = _features(sources[0]), _rows(trtp, sources[0])
        types = {"query": _pointer(query), "key_norm": _pointer(key_norm), "sources": tuple(map(_pointer, sources))}
        types |= {"rows": "i32", "out": _pointer(sources[0])}
        ptx, tile = _tiled("depth_attention", types, {"EPS": values["eps"], "SCALE": values["scale"]}, d)
        return ptx, trtp.cdiv(rows, tile), rows

    names = ("query", "key_norm", *(f"v{i}" for i in range(n)))
    return _Plugin(depth_attention_name(n), names, ("eps", "scale"), 1, lambda q, g, v, *_: v.like(), implement)


def _inter_block(trtp: Any, n: int, reads: int) -> _Plugin:
    def describe(queries: Any, key_norms: Any, block: Any, *_: Any) -> Any:
        o = block.like()
        o.dtype = type(block.dtype).FLOAT
        z = o.like()
        z.shape_expr = trtp.ShapeExprs.from_tuple(tuple(block.shape_expr[i] for i in range(block.ndim - 1)))
        return (*(o.like() for _ in range(reads)), *(z.like() for _ in range(reads)))

    def implement(inputs: tuple[Any, ...], values: Mapping[str, float]) -> tuple[Ptx, Any, Any]:
        from attnres_compile.ops.triton.phase_one import read_groups

        queries, key_norms, *blocks = inputs
        d, rows = _features(blocks[0]), _rows(trtp, blocks[0])
        group, size = read_groups(reads, d)
        types = {"queries": _pointer(queries), "key_norms": _pointer(key_norms), "blocks": tuple(map(_pointer, blocks))}
        types |= {"rows": "i32", "o_out": ("*fp32",) * reads, "z_out": ("*fp32",) * reads}
        constants = {"EPS": values["eps"], "GROUP": group, "D": d, "COLUMNS": size.columns}
        ptx = compile_ptx("inter_block", types, constants, size.warps)
        return ptx, rows * -(-reads // group), rows

    names = ("queries", "key_norms", *(f"b{i}" for i in range(n)))
    return _Plugin(inter_block_name(n, reads), names, ("eps",), 2 * reads, describe, implement)


def _merge(trtp: Any) -> _Plugin:
    names = ("o", "z", "partial", "query", "key_norm")

    def implement(inputs: tuple[Any, ...], values: Mapping[str, float]) -> tuple[Ptx, Any, Any]:
        partial = inputs[2]
        rows = _rows(trtp, partial)
        types = dict(zip(("o_in", "z_in", *names[2:]), map(_pointer, inputs), strict=True))
        types |= {"rows": "i32", "out": _pointer(partial)}
        constants = {"EPS": values["eps"], "SCALE": values["scale"]}
        ptx, tile = _tiled("merge", types, constants, _features(partial))
        return ptx, trtp.cdiv(rows, tile), rows

    return _Plugin(MERGE, names, ("eps", "scale"), 1, lambda o, z, partial, *_: partial.like(), implement)


def _merge_norm(trtp: Any, norm: str, add: bool) -> _Plugin:
    names = ("o", "z", "partial", *(("branch",) if add else ()), "query", "key_norm", "weight", "bias")

    def implement(inputs: tuple[Any, ...], values: Mapping[str, float]) -> tuple[Ptx, Any, Any]:
        partial, rows = _pointer(inputs[2]), _rows(trtp, inputs[2])
        types = dict(zip(("o_in", "z_in", *names[2:]), map(_pointer, inputs), strict=True))
        types |= {"rows": "i32", "out": partial} | ({"total": partial} if add else {})
        constants: dict[str, Any] = {"EPS": values["eps"], "NORM_EPS": values["norm_eps"], "SCALE": values["scale"]}
        constants |= {"CENTRED": norm == "layer"} | ({} if add else {"branch": None, "total": None})
        ptx, tile = _tiled("add_merge_norm", types, constants, _features(inputs[2]))
        return ptx, trtp.cdiv(rows, tile), rows

    def describe(o: Any, z: Any, partial: Any, *_: Any) -> Any:
        return (partial.like(), partial.like()) if add else partial.like()

    return _Plugin(
        merge_norm_name(norm, add=add), names, ("eps", "norm_eps", "scale"), 2 if add else 1, describe, implement
    )


def _tiled(kernel: str, types: Mapping[str, Any], constants: Mapping[str, Any], d: int) -> tuple[Ptx, int]:
    """The PTX of a kernel that takes a tile of rows a program, and the rows of a tile."""
    from attnres_compile.ops.triton.launch import tile

    size = tile(d)
    every = {**constants, "D": d, "COLUMNS": size.columns, "ROWS": size.rows}
    return compile_ptx(kernel, types, every, size.warps), size.rows


def _pointer(tensor: Any) -> str:
    name = tensor.dtype.name
    if name not in _TYPES:
        raise ExportError(f"the depth-attention plugins take FLOAT, HALF and BF16 tensors, got {name}")
    return f"*{_TYPES[name]}"


def _features(tensor: Any) -> int:
    size = tensor.shape_expr[tensor.ndim - 1]
    if not size.is_constant:
        raise ExportError("the number of features must be static in the model")
    return int(size.constant_value())


def _rows(trtp: Any, tensor: Any) -> Any:
    leading = tuple(tensor.shape_expr[i] for i in range(tensor.ndim - 1))
    return trtp.ShapeExprs.from_tuple(leading).numel()


def _leaves(signature: Mapping[str, Any]) -> list[tuple[tuple[int, ...], str]]:
    """The kernel's arguments in order, those in tuples too, each with its path."""
    found: list[tuple[tuple[int, ...], str]] = []
    for i, kind in enumerate(signature.values()):
        parts = enumerate(kind) if isinstance(kind, tuple) else [(None, kind)]
        found += [((i,) if j is None else (i, j), part) for j, part in parts]
    return found


def _tensorrt_plugin() -> Any:
    for name, extra in (("triton", "gpu"), ("tensorrt.plugin", "tensorrt")):
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a library that cannot be loaded is no ImportError
            raise MissingDependencyError(
                f"TensorRT plugins need {name}, which cannot be imported ({error}): "
                f"pip install 'attnres-compile[{extra}]'"
            ) from error
    return module
