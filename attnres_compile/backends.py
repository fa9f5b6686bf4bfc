"""``torch.compile(model, backend="attnres")``: the passes over Dynamo's graph, then another compiler."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import ConstantSource
from torch.utils.weak import WeakIdKeyDictionary

from attnres_compile.attach import ATTRIBUTE
from attnres_compile.chains import ResidualChain
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import InputError, RefusedError
from attnres_compile.graphs import reads_for, rewriting
from attnres_compile.ops._library import IMPLEMENTATIONS
from attnres_compile.passes.base import Subject, run
from attnres_compile.passes.pipelines import GRAPH, OPTIMIZE
from attnres_compile.reads import ChainReads, DepthReads

Inner = str | Callable[..., Any]


class AttnResBackend:
    """A backend for ``torch.compile``: schedules, fuses and lowers depth attention, then calls another compiler.

    A transformed model brings its reads along. In the graph of any other model the residual chains are rewritten first;
    the new parameters belong to this object, since they exist only once the model has been called: train them by
    ``backend.parameters()``, save them by ``backend.state_dict()``. Prefer ``attnres_compile.transform`` for training.
    One object serves several models and every recompilation; a chain is known by the first parameter that meets what
    comes from its source.

    Args:
        config: how to rewrite graphs without reads. By default 8 blocks, and a warning where no chain qualifies; with
            ``strict`` that is an error.
        inner: the compiler behind: "inductor", the name of another backend (e.g. "aot_eager"), or a callable that takes
            a graph module and its example inputs. ``mode`` and ``options`` of ``torch.compile`` are handed on to it.
    """

    def __init__(self, config: AttnResConfig | None = None, *, inner: Inner = "inductor") -> None:
        """Make a backend without parameters."""
        self.config = AttnResConfig(strict=False) if config is None else config
        self.inner = inner
        self.__name__ = "attnres"
        self._reads = ChainReads()
        self._owners: Any = WeakIdKeyDictionary()
        self._warned: set[str] = set()

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs."""
        graphs = [m for m in module.modules() if isinstance(m, fx.GraphModule)]
        for graph in graphs:
            _set_values(graph)
        if not any(node.target in IMPLEMENTATIONS for graph in graphs for node in graph.graph.nodes):
            self._rewrite(module, inputs)
        for graph in graphs:
            run(OPTIMIZE, Subject(graph, self.config))
            _set_example_values(graph)
        if self.inner == "inductor":
            from attnres_compile.inductor import compile_module

            return compile_module(module, inputs, **options)
        inner: Any = lookup_backend(self.inner) if isinstance(self.inner, str) else self.inner
        return inner(module, inputs, **options)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The pseudo-queries and key norms ``[L, d]`` of the models compiled so far; none before the first call."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with names ``attnres.<chain>.query`` and ``.key_norm``, as a transformed model has them."""
        return self._reads.named_parameters(prefix=ATTRIBUTE)

    def state_dict(self) -> dict[str, Tensor]:
        """The parameters' values by name."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set the parameters.

        Raises:
            InputError: the names or shapes differ; nothing is set then.
        """
        ours = dict(self.named_parameters())
        if not ours:
            raise InputError("this backend has no parameters yet: call the compiled model once, then load")
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        expected = {name: tuple(value.shape) for name, value in ours.items()}
        if shapes != expected:
            raise InputError(f"this backend has {expected}, the state has {shapes}")
        for name, parameter in ours.items():
            parameter.data.copy_(state[name])

    def _rewrite(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        reason = _broken(module)
        subject = Subject(module, self.config)
        if not reason:
            run(GRAPH, subject)
            reasons = dict.fromkeys(f"{refusal.reason} ({refusal.where})" for refusal in subject.refusals)
            reason = "; ".join(reasons)
        if not any(chain.plan is not None for chain in subject.chains):
            self._no_chain(reason)
            return
        given = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=False))
        sources = {node.name: node._dynamo_source for node in given}
        seen: Counter[fx.Node | None] = Counter()

        def reads_of(chain: ResidualChain) -> DepthReads:
            owner = _owner(chain, given)
            reads = self._reads_of(chain, seen[owner], None if owner is None else given[owner])
            seen[owner] += 1
            if owner is not None:
                # Parameters are inputs to Dynamo: without this, one graph would serve every model of a class.
                install_guard(sources[owner.name].make_guard(GuardBuilder.ID_MATCH))
            return reads

        run((rewriting(subject, reads_of),), subject)
        first = next(iter(module.graph.nodes))
        for node in module.graph.find_nodes(op="placeholder"):
            first.prepend(node)
        # What ahead-of-time autograd asks of Dynamo's graphs: where each input comes from.
        for node in module.graph.find_nodes(op="placeholder"):
            node._dynamo_source = sources[node.name]
        origin: Any = module._param_name_to_source
        for name, _ in module.get_submodule(ATTRIBUTE).named_parameters(prefix=ATTRIBUTE):
            origin[name] = ConstantSource(f"__{name.replace('.', '_')}")

    def _reads_of(self, chain: ResidualChain, index: int, owner: Any) -> DepthReads:
        assert chain.plan is not None
        known = self._owners.setdefault(self._reads if owner is None else owner, {})
        key = index, chain.plan.reads, chain.width
        if key not in known:
            known[key] = reads = reads_for(chain, self.config)
            if owner is not None and owner.is_floating_point():
                # Under autocast the source's dtype is not that of the parameters.
                reads.to(owner.dtype)
            self._reads.append(reads)
        return known[key]

    def _no_chain(self, reason: str) -> None:
        text = f"no residual chain of this graph can be given depth attention: {reason}"
        if self.config.strict:
            raise RefusedError(f"{text}; with strict=False the graph is compiled as it is")
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"{text}. It is compiled as it is", stacklevel=2)


default_backend = AttnResBackend()


def attnres(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """What ``backend="attnres"`` names: ``default_backend``, which keeps the parameters of models without reads."""
    return default_backend(module, inputs, **options)


def _owner(chain: ResidualChain, given: Mapping[fx.Node, Any]) -> fx.Node | None:
    """The first parameter that meets what comes from the chain's source: it tells models and their parts apart."""
    node, reached = chain.source, {chain.source}
    while node.op != "output":
        node = node.next
        if reached.isdisjoint(node.all_input_nodes):
            continue
        reached.add(node)
        for source in node.all_input_nodes:
            if isinstance(given.get(source), nn.Parameter):
                return source
    return None


def _broken(module: fx.GraphModule) -> str:
    """Why this graph is but a part of what is compiled, or nothing."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        where = "".join(f" at {frame.filename}:{frame.lineno}" for frame in reason.user_stack[-1:])
        return f"Dynamo broke the graph{where}; remove the break, or use attnres_compile.transform on the model"
    if any("torch_dynamo_resume_in_" in node.meta.get("stack_trace", "") for node in module.graph.nodes):
        return "it goes on after a graph break; remove the break, or use attnres_compile.transform on the model"
    return ""


def _set_values(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if "example_value" in node.meta:
            node.meta["val"] = node.meta["example_value"]


def _set_example_values(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta.pop("val")
