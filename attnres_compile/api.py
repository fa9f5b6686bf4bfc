"""``transform``, ``inspect`` and ``verify``, one line per step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from attnres_compile import graphs
from attnres_compile.attach import ATTRIBUTE, Attachment, attach, is_attached
from attnres_compile.capture.copies import shared_copy
from attnres_compile.capture.inputs import Inputs, normalise
from attnres_compile.capture.trace import Captured, capture
from attnres_compile.chains import Refusal, ResidualChain
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import InputError, OptionError, RefusedError
from attnres_compile.observer import Observer
from attnres_compile.passes import _nodes
from attnres_compile.passes.base import Subject, run
from attnres_compile.passes.pipelines import live
from attnres_compile.placement import attachments
from attnres_compile.report import AttnResReport, ChainReport, Check, RefusalReport
from attnres_compile.sublayer_names import sublayer_names
from attnres_compile.verification import Mode, raise_failures, run_checks, unlearned

UNLEARNED = (
    "nothing would learn from its reads: autograd records no way from them to the outputs (torch.no_grad, values that "
    "become integers, a function with a backward of its own)"
)
M = TypeVar("M", nn.Module, ExportedProgram)
T = TypeVar("T")
Attempt = Callable[[AttnResConfig], tuple[AttnResReport, list[Check], T]]


def transform(
    model: M, example_inputs: Any = None, *, inplace: bool = False, verify: Mode = "full", **options: Any
) -> M:
    """Give a model Attention Residuals (arXiv 2603.15031). With its zero queries it computes what it computed before.

    A module comes back as a model of the same class that shares the original's parameters and runs the user's own
    code; ``attnres.<chain>.query`` and ``.key_norm`` (``[L, d]``) are new in its ``state_dict``. A ``GraphModule`` or
    an ``ExportedProgram`` comes back as a rewritten graph with the same signature.

    Args:
        model: any module, graph module or exported program.
        example_inputs: arguments of one forward call: a tensor, a tuple, or a mapping of keyword arguments. Hugging
            Face models may go without; an exported program brings its own.
        inplace: change the model itself instead of a copy.
        verify: "full" checks outputs, gradients, training mode and a second shape; "quick" one forward; "off" nothing.
            What is checked is also whether every chain's reads would learn: one that would not (layers under
            ``torch.no_grad``) is left out, and the report says so.
        **options: the fields of ``AttnResConfig``: ``num_blocks`` or ``block_size``, ``preserve``, ``key_norm``,
            ``eps``, ``chains``, ``strict``.

    Returns:
        The transformed model; its ``attnres_report`` says what was done.

    Raises:
        OptionError: options that exclude each other, or more blocks than sublayers.
        InputError: example inputs that do not fit the model's forward.
        CaptureError: no front end could trace the model.
        RefusedError: no chain qualifies (with ``strict``), or the model cannot be transformed; it is left as it was.
        VerificationError: a check failed; the model is left as it was.
    """
    config = AttnResConfig(**options)
    if verify not in ("full", "quick", "off"):
        raise OptionError(f"verify is 'full', 'quick' or 'off', got {verify!r}")
    if isinstance(model, ExportedProgram):
        program: Any = _transform_program(model, config, verify)
        return program
    if isinstance(model, fx.GraphModule):
        graph: Any = _transform_graph(model, _inputs_of_graph(model, example_inputs), config, verify)
        return graph
    inputs = _example_inputs(model, example_inputs)
    report, found = _settled(lambda config: _attempt(model, inputs, config, verify), config)
    result = model if inplace else shared_copy(model)
    if found:
        attach(result, found, key_norm=config.key_norm)
    result.attnres_report = report  # type: ignore[assignment]
    if found and callable(getattr(getattr(result, "config", None), "to_json_file", None)):
        # A Hugging Face config: save_pretrained writes it beside the weights, and from_pretrained finds it there.
        result.config.attnres = dict(report.options)  # type: ignore[union-attr]
    return result


def inspect(model: nn.Module | ExportedProgram, example_inputs: Any = None, **options: Any) -> AttnResReport:
    """A dry run of ``transform``: the same report, nothing changed, and no error where no chain qualifies.

    Args:
        model: as for ``transform``.
        example_inputs: as for ``transform``.
        **options: as for ``transform``.

    Raises:
        OptionError: as ``transform``.
        InputError: as ``transform``.
        CaptureError: as ``transform``.
    """
    config = AttnResConfig(**{**options, "strict": False})
    if isinstance(model, ExportedProgram):
        captured, subject = graphs.analyse_program(model, config)
        return _report("ExportedProgram", captured.front_end, subject)
    if isinstance(model, fx.GraphModule):
        captured, subject = graphs.analyse_graph(model, _inputs_of_graph(model, example_inputs), config)
        return _report(type(model).__name__, captured.front_end, subject)
    return _analyse(model, _example_inputs(model, example_inputs), config)[0]


def pass_by_pass(
    model: nn.Module | ExportedProgram, example_inputs: Any = None, **options: Any
) -> Iterator[tuple[str, str | None]]:
    """What each pass makes of a model's graph: its name and the graph's text after it, None where nothing changed.

    A live module is shown as the graph that ``torch.compile(model, backend="attnres")`` and exports would rewrite.

    Args:
        model: as for ``transform``.
        example_inputs: as for ``transform``.
        **options: as for ``transform``.

    Raises:
        OptionError: as ``transform``.
        InputError: as ``transform``.
        CaptureError: as ``transform``.
    """
    config = AttnResConfig(**{**options, "strict": False})
    if isinstance(model, ExportedProgram):
        captured, _ = graphs.analyse_program(model, config)
    elif isinstance(model, fx.GraphModule):
        captured, _ = graphs.analyse_graph(model, _inputs_of_graph(model, example_inputs), config)
    else:
        captured = capture(model, _example_inputs(model, example_inputs))
    return graphs.pass_by_pass(captured, config)


def verify(
    original: nn.Module, model: nn.Module, example_inputs: Any = None, *, mode: Mode = "full"
) -> tuple[Check, ...]:
    """Compare a transformed model with the original while its queries are zero, and check its new parameters.

    Both models are left as they are: the checks run on copies that share their parameters.

    Args:
        original: the model before.
        model: what ``transform`` made of it, trained or not.
        example_inputs: as for ``transform``.
        mode: "full" or "quick".

    Returns:
        Every check with its largest relative error and what is allowed; ``check.passed`` says which hold.

    Raises:
        InputError: example inputs that do not fit, or ``model`` was not transformed.
    """
    if ATTRIBUTE not in dict(model.named_children()):
        raise InputError(f"{type(model).__name__} has no {ATTRIBUTE!r}: pass what attnres_compile.transform returned")
    inputs = _example_inputs(original, example_inputs, fresh=False)
    return tuple(run_checks(shared_copy(original), shared_copy(model), inputs, None, mode))


def _example_inputs(model: nn.Module, example_inputs: Any, *, fresh: bool = True) -> Inputs:
    if fresh and (is_attached(model) or ATTRIBUTE in dict(model.named_children())):
        raise RefusedError(
            f"{type(model).__name__} has depth attention already (its {ATTRIBUTE!r}); transform the original model "
            "again instead, or change the queries of this one"
        )
    inputs = normalise(model, example_inputs)
    trial = shared_copy(model).eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            args, kwargs = inputs.fresh()
            trial(*args, **kwargs)
    except Exception as error:
        raise InputError(
            f"the example inputs do not fit {type(model).__name__}.forward: {type(error).__name__}: {error}"
        ) from error
    return inputs


def _inputs_of_graph(module: fx.GraphModule, example_inputs: Any) -> Inputs:
    if ATTRIBUTE in dict(module.named_children()):
        raise RefusedError("this graph has depth attention already; transform the original graph instead")
    if example_inputs is not None:
        return normalise(module, example_inputs)
    if any("val" not in node.meta for node in module.graph.nodes if node.op == "placeholder"):
        raise InputError("this graph has no shapes in its nodes' meta; pass example_inputs")
    return Inputs((), {})


def _settled(attempt: Attempt[T], config: AttnResConfig) -> tuple[AttnResReport, T]:
    """What an attempt gives, without the chains that would learn nothing where others would.

    Raises:
        RefusedError: as ``raise_failures``; so does a chain that ``chains=`` asked for and that would learn nothing.
        VerificationError: as ``raise_failures``.
    """
    report, checks, result = attempt(config)
    rewritten = [chain for chain in report.chains if chain.rewritten]
    lost = [rewritten[i] for i in unlearned(checks)] if config.chains is None else []
    if 0 < len(lost) < len(rewritten):
        report, checks, result = attempt(replace(config, chains=[c.index for c in rewritten if c not in lost]))
        refused = [RefusalReport(UNLEARNED, f"chain {chain.index}", chain.where) for chain in lost]
        report = replace(report, refused=(*report.refused, *refused))
    raise_failures(checks, report.model)
    return replace(report, checks=tuple(checks)), result


def _attempt(
    model: nn.Module, inputs: Inputs, config: AttnResConfig, mode: Mode
) -> tuple[AttnResReport, list[Check], list[Attachment]]:
    """The report, the checks of a copy, and what to attach."""
    report, found, pushes = _analyse(model, inputs, config)
    if not found:
        return report, [], found
    candidate = _attached(shared_copy(model), found, config)
    return report, run_checks(shared_copy(model), candidate, inputs, pushes, mode), found


def _analyse(
    model: nn.Module, inputs: Inputs, config: AttnResConfig
) -> tuple[AttnResReport, list[Attachment], dict[int, int]]:
    """The report, what to attach, and the adds per chain. Changes nothing."""
    captured = capture(model, inputs)
    report, found, pushes = _found(model, captured, inputs, config, outermost=True)
    if found and _pushes(model, found, inputs, config) != pushes:
        # A module that only reads in the graph may still hand the stream on; its parts then read for themselves.
        report, found, pushes = _found(model, captured, inputs, config, outermost=False)
    return report, found, pushes


def _found(
    model: nn.Module, captured: Captured, inputs: Inputs, config: AttnResConfig, *, outermost: bool
) -> tuple[AttnResReport, list[Attachment], dict[int, int]]:
    subject = run(live(outermost=outermost), Subject(captured.module, config))
    subject.refusals += _scripted(model) if not subject.chains else []
    report = _report(type(model).__name__, captured.front_end, subject)
    chains = _selected(subject, report)
    pushes = {chain.plan.chain: len(chain.pushes) for chain in chains if chain.plan is not None}
    return report, attachments(model, captured, chains, inputs) if chains else [], pushes


def _scripted(model: nn.Module) -> list[Refusal]:
    reason = "a ScriptModule hides its adds from Python; transform the eager module and script nothing on the stream"
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    return [Refusal(reason, name, f"in module {name!r}") for name in scripted[:1]]


def _pushes(model: nn.Module, found: list[Attachment], inputs: Inputs, config: AttnResConfig) -> dict[int, int] | None:
    """Pushes per chain of one run, or None where it fails: verification then says why."""
    trial = _attached(shared_copy(model), found, config).eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(), Observer() as observer:
            args, kwargs = inputs.fresh()
            trial(*args, **kwargs)
    except Exception:  # the checks run the model again and report what it says
        return None
    return observer.pushes


def _attached(model: nn.Module, found: list[Attachment], config: AttnResConfig) -> nn.Module:
    attach(model, found, key_norm=config.key_norm)
    return model


def _transform_program(program: ExportedProgram, config: AttnResConfig, mode: Mode) -> ExportedProgram:
    if any(name.startswith(f"{ATTRIBUTE}.") for name in program.state_dict):
        raise RefusedError("this program has depth attention already; transform the original program instead")

    def attempt(config: AttnResConfig) -> tuple[AttnResReport, list[Check], ExportedProgram]:
        captured, subject = graphs.analyse_program(program, config)
        report = _report("ExportedProgram", captured.front_end, subject)
        if not _selected(subject, report):
            return report, [], program
        result = graphs.rewrite_program(captured, subject)
        if mode == "off" or program.example_inputs is None:
            return report, [], result
        inputs = Inputs(*program.example_inputs)
        return report, run_checks(program.module(), result.module(), inputs, None, "quick"), result

    report, result = _settled(attempt, config)
    result.attnres_report = report  # type: ignore[attr-defined]
    return result


def _transform_graph(module: fx.GraphModule, inputs: Inputs, config: AttnResConfig, mode: Mode) -> fx.GraphModule:
    def attempt(config: AttnResConfig) -> tuple[AttnResReport, list[Check], fx.GraphModule]:
        captured, subject = graphs.analyse_graph(module, inputs, config)
        report = _report(type(module).__name__, captured.front_end, subject)
        if not _selected(subject, report):
            return report, [], module
        result = graphs.rewrite_graph(subject)
        if not (inputs.args or inputs.kwargs):
            return report, [], result
        return report, run_checks(shared_copy(module), shared_copy(result), inputs, None, mode), result

    report, result = _settled(attempt, config)
    result.attnres_report = report  # type: ignore[assignment]
    return result


def _selected(subject: Subject, report: AttnResReport) -> list[ResidualChain]:
    """The planned chains; none is an error with ``strict``."""
    chains = [chain for chain in subject.chains if chain.plan is not None]
    if not chains and subject.config.strict:
        raise RefusedError(
            f"no residual chain of {report.model} can be given depth attention. {report}\n"
            "With strict=False the model comes back unchanged, with this report"
        )
    return chains


def _report(model: str, front_end: str, subject: Subject) -> AttnResReport:
    chains = tuple(_chain_report(i, chain, subject.config) for i, chain in enumerate(subject.chains))
    refused = tuple(RefusalReport(r.reason, r.node, r.where) for r in subject.refusals)
    return AttnResReport(model, front_end, chains, refused, options=_options(subject.config, chains))


def _options(config: AttnResConfig, chains: tuple[ChainReport, ...]) -> dict[str, Any]:
    """What makes the model, as plain data: a predicate on chains becomes the indices that it chose."""
    options = {field.name: getattr(config, field.name) for field in fields(config) if field.name != "strict"}
    if config.chains is not None:
        options["chains"] = [chain.index for chain in chains if chain.rewritten]
    return options


def _chain_report(index: int, chain: ResidualChain, config: AttnResConfig) -> ChainReport:
    blocks = config.block_sizes(chain.sublayers) if chain.plan is None else chain.plan.block_sizes
    reads = chain.sublayers
    start = chain.start
    source = "in the graph" if start is None else f"with an {start.side} of {start.module or 'the model itself'}"
    return ChainReport(
        index=index,
        rewritten=chain.plan is not None,
        source=source,
        container=chain.container,
        width=chain.width,
        adds=len(chain.pushes),
        owners=dict(Counter(push.owner_class or "the graph" for push in chain.pushes)),
        sublayers=chain.sublayers,
        blocks=blocks,
        reads=reads,
        parameters=reads * chain.width * (2 if config.key_norm else 1),
        where=_nodes.location(chain.pushes[0].node),
        names=sublayer_names(chain),
    )
