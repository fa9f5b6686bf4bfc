"""The command line: ``attnres inspect | transform | verify | export | plot | doctor``.

Reports go to stdout, as tables or, with ``--json``, as JSON; progress and errors go to stderr. The exit code is 0 when
all is well, 1 when a model is refused or fails a check, and 2 when the call itself is wrong.
"""

from __future__ import annotations

import io
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from torch import nn

from attnres_compile import api, cli_doctor, cli_models, cli_plots
from attnres_compile.analysis.measure import Measurement, measure
from attnres_compile.capture.inputs import normalise
from attnres_compile.cli_models import Loaded
from attnres_compile.cli_tables import tables
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import AttnResError, InputError, MissingDependencyError, OptionError, RefusedError
from attnres_compile.pretrained import saved_options
from attnres_compile.report import AttnResReport
from attnres_compile.verification import Mode

GOOD, REFUSED, WRONG_CALL = 0, 1, 2
_WRONG_CALL_ERRORS: Final = (InputError, OptionError, MissingDependencyError, OSError)


app = typer.Typer(
    name="attnres",
    help="Give PyTorch models Attention Residuals (arXiv 2603.15031), and prove that nothing else changed.",
    epilog=f"MODEL is {cli_models.FORMS}. A callable returns a module, or a module and its example inputs.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help=f"{cli_models.FORMS}.", show_default=False)]
NumBlocks = Annotated[int | None, typer.Option("--num-blocks", help="Blocks per chain.", show_default="8")]
BlockSize = Annotated[int | None, typer.Option("--block-size", help="Sublayers per block instead; 1: Full AttnRes.")]
NoPreserve = Annotated[bool, typer.Option("--no-preserve", help="The paper's weighted mean; outputs then change.")]
NoKeyNorm = Annotated[bool, typer.Option("--no-key-norm", help="No learned weight in the keys' RMSNorm.")]
Eps = Annotated[float, typer.Option("--eps", help="Added to the mean square in the keys' RMSNorm.")]
Chains = Annotated[str | None, typer.Option("--chains", help="Indices of the chains to rewrite, as 0,2; default: all.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="Load as float32, bfloat16, ...; as stored if left out.")]
Passes = Annotated[bool, typer.Option("--passes", help="Print the graph after each pass instead of the report.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Verify = Annotated[Mode, typer.Option("--verify", help="What is checked before anything is written.")]
Quick = Annotated[bool, typer.Option("--quick", help="Leave out gradients, training mode and a second shape.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Directory to write.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Replace what an earlier transform wrote there.")]
Saved = Annotated[Path | None, typer.Argument(metavar="[TRANSFORMED_DIR]", help="What transform wrote.")]
Weights = Annotated[Path | None, typer.Option("--weights", help="What transform wrote; MODEL is the original.")]
ExportPath = Annotated[Path, typer.Argument(metavar="PATH", help="File to write.", show_default=False)]
Format = Annotated[Literal["onnx", "tensorrt"], typer.Option("--format", help="ONNX, or an engine for NVIDIA GPUs.")]
Precision = Annotated[str, typer.Option("--precision", help="Engines: fp32, fp16 or bf16.")]
Targets = Annotated[str | None, typer.Option("--compute-capabilities", help="Engines: GPUs, as 80,86 for 8.0, 8.6.")]
Batch = Annotated[str | None, typer.Option("--batch", help="Engines: smallest:usual:largest batch; else static.")]
Length = Annotated[str | None, typer.Option("--length", help="Engines: the same of the sequence's length.")]
Plugins = Annotated[bool, typer.Option("--plugins", help="Engines of tensorrt: the reads as plugins with kernels.")]
Opset = Annotated[int, typer.Option("--opset", help="Version of ONNX's operator set.")]
Runtime = Annotated[str, typer.Option("--target", help="Whose form of the reads: onnxruntime or tensorrt.")]
Body = Annotated[str | None, typer.Option("--body", help="Form of the functions: unrolled, tied, stacked or matmul.")]
Cache = Annotated[bool, typer.Option("--cache", help="A decoder's step, with its cache as inputs and outputs.")]
Atol = Annotated[float, typer.Option("--atol", help="Largest difference allowed between ONNX Runtime and PyTorch.")]
Kind = Annotated[cli_plots.Kind, typer.Argument(metavar="weights|dynamics|mixing|all", show_default=False)]
Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help=f"{cli_models.FORMS}.", show_default=False)]
Text_ = Annotated[Path | None, typer.Option("--text", help="A text to measure hf: models on.")]
Static = Annotated[bool, typer.Option("--static", help="Fix all axes to the example inputs' sizes.")]


@app.command()
def inspect(
    model: Model,
    num_blocks: NumBlocks = None,
    block_size: BlockSize = None,
    no_preserve: NoPreserve = False,
    no_key_norm: NoKeyNorm = False,
    eps: Eps = 1e-6,
    chains: Chains = None,
    dtype: Dtype = None,
    passes: Passes = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the residual chains of a model, and what a transform would do; exit with 1 where no chain qualifies."""
    with _reported(debug):
        options = _options(num_blocks, block_size, no_preserve, no_key_norm, eps, chains)
        loaded = _load_original(model, dtype)
        if passes:
            for name, graph in api.pass_by_pass(loaded.model, loaded.example_inputs, **options):
                print(f"\n# after {name}\n{graph}" if graph else f"\n# {name} leaves the graph as it is")
            return
        with _step("tracing the model and looking for residual chains"):
            report = api.inspect(loaded.model, loaded.example_inputs, **options)
        _require_chains(report, options, json)
        _show(report, json)


@app.command()
def transform(
    model: Model,
    output: Output,
    force: Force = False,
    verify: Verify = "full",
    num_blocks: NumBlocks = None,
    block_size: BlockSize = None,
    no_preserve: NoPreserve = False,
    no_key_norm: NoKeyNorm = False,
    eps: Eps = 1e-6,
    chains: Chains = None,
    dtype: Dtype = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Give a model depth attention, check it, and write it to a directory with its options and report."""
    with _reported(debug):
        options = _options(num_blocks, block_size, no_preserve, no_key_norm, eps, chains)
        with cli_models.new_directory(output, force) as folder:
            loaded = _load_original(model, dtype)
            transformed, report = _transformed(loaded, options, verify, json)
            with _step(f"writing {output}"):
                cli_models.save(loaded, transformed, options, report, folder)
        _show(report, json)


@app.command()
def verify(
    model: Model,
    transformed_dir: Saved = None,
    quick: Quick = False,
    num_blocks: NumBlocks = None,
    block_size: BlockSize = None,
    no_preserve: NoPreserve = False,
    no_key_norm: NoKeyNorm = False,
    eps: Eps = 1e-6,
    chains: Chains = None,
    dtype: Dtype = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare a model with what transform wrote, or, without a directory, with its transform in memory."""
    with _reported(debug):
        options = _options(num_blocks, block_size, no_preserve, no_key_norm, eps, chains)
        if transformed_dir is not None:
            saved_options(transformed_dir)
        loaded = _load_original(model, dtype)
        transformed, report = _transformed(loaded, options, "off", json, transformed_dir)
        with _step("comparing with the original"):
            checks = api.verify(loaded.model, transformed, loaded.example_inputs, mode="quick" if quick else "full")
        _show(replace(report, checks=checks), json)
        failed = [check.name for check in checks if not check.passed]
        if failed:
            raise RefusedError(f"{len(failed)} of {len(checks)} checks failed: {'; '.join(failed)}")


@app.command()
def export(
    model: Model,
    path: ExportPath,
    format: Format = "onnx",
    weights: Weights = None,
    opset: Opset = 23,
    atol: Atol = 1e-4,
    static: Static = False,
    precision: Precision = "fp32",
    compute_capabilities: Targets = None,
    batch: Batch = None,
    length: Length = None,
    plugins: Plugins = False,
    verify: Verify = "full",
    num_blocks: NumBlocks = None,
    block_size: BlockSize = None,
    no_preserve: NoPreserve = False,
    no_key_norm: NoKeyNorm = False,
    eps: Eps = 1e-6,
    chains: Chains = None,
    dtype: Dtype = None,
    target: Runtime = "onnxruntime",
    body: Body = None,
    cache: Cache = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Transform a model and write it as ONNX, or as a TensorRT engine; hf: also takes what transform wrote."""
    with _reported(debug):
        if format == "onnx" and (precision != "fp32" or compute_capabilities or batch or length or plugins):
            of_engines = "--precision, --compute-capabilities, --batch, --length and --plugins"
            raise OptionError(f"{of_engines} need --format tensorrt")
        options = _options(num_blocks, block_size, no_preserve, no_key_norm, eps, chains)
        cli_models.require_writable(path)
        if weights is not None:
            saved_options(weights)
        loaded = _load(model, dtype)
        saved = weights or (loaded.directory if loaded.options is not None else None)
        transformed, report = _transformed(loaded, options, verify, json, saved)
        inputs = normalise(transformed, None).kwargs if loaded.example_inputs is None else loaded.example_inputs
        runtime: Any = {"opset_version": opset, "atol": atol, "target": target, "body": body, "echo": _progress}
        if format == "tensorrt":
            from attnres_compile import cli_tensorrt

            with _step(f"building {path}"):
                axes = {"batch": batch, "sequence": length}
                build: Any = {"precision": precision, "plugins": plugins, "opset_version": opset, "echo": _progress}
                cli_tensorrt.export(transformed, inputs, path, compute_capabilities, axes, **build)
        elif cache:
            from attnres_compile.exporters.onnx_decoder import export_onnx_decoder

            with _step(f"exporting a step with its cache to {path} and comparing with ONNX Runtime"):
                export_onnx_decoder(transformed, path, **runtime)
        else:
            from attnres_compile.exporters.onnx import export_onnx

            with _step(f"exporting to {path} and comparing with ONNX Runtime"):
                export_onnx(transformed, inputs, path, dynamic_shapes={} if static else None, **runtime)
        _show(report, json)


@app.command()
def plot(
    kind: Kind,
    models: Models,
    output: Output,
    text: Text_ = None,
    num_blocks: NumBlocks = None,
    block_size: BlockSize = None,
    dtype: Dtype = None,
    debug: Debug = False,
) -> None:
    """Draw what models do with their depth: PNG files and index.html. A model not yet transformed is, in memory."""
    with _reported(debug):
        options = _options(num_blocks, block_size, False, False, 1e-6, None)
        measurements: dict[str, Measurement] = {}
        for name in models:
            loaded = _load(name, dtype)
            saved = loaded.directory if loaded.options is not None else None
            model, _ = _transformed(loaded, options, "off", False, saved)
            with _step(f"measuring {name}"):
                label = cli_plots.label(name, measurements)
                measurements[label] = measure(model, cli_plots.inputs_of(loaded, model, text))
        with _step(f"drawing into {output}"):
            written = cli_plots.write(kind, measurements, output)
        print("\n".join(map(str, written)))


app.command()(cli_doctor.doctor)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, and exit.

    Args:
        arguments: instead of those of the process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a tick is no reason to fail
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(args=given or ["--help"], prog_name="attnres", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        _print_error("interrupted")
        code = 130
    except Exception as error:
        # What typer raises for a wrong call; its base class is public in some versions only.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        _print_error(f"{message()}\nattnres --help lists commands, attnres COMMAND --help their options")
        code = WRONG_CALL
    sys.exit(code if isinstance(code, int) else GOOD)


@contextmanager
def _reported(debug: bool) -> Iterator[None]:
    """Turn an error into its message and an exit code."""
    try:
        yield
    except Exception as error:
        if debug:
            traceback.print_exc()
        known = isinstance(error, AttnResError | OSError)
        _print_error(str(error) if known else f"{type(error).__name__}: {error} (--debug shows where)")
        raise typer.Exit(WRONG_CALL if isinstance(error, _WRONG_CALL_ERRORS) else REFUSED) from error


def _options(
    num_blocks: int | None, block_size: int | None, no_preserve: bool, no_key_norm: bool, eps: float, chains: str | None
) -> dict[str, Any]:
    """The fields of ``AttnResConfig``, checked before anything takes time."""
    try:
        indices = None if chains is None else [int(index) for index in chains.split(",")]
    except ValueError as error:
        raise OptionError(f"--chains takes indices, as 0,2; got {chains!r}") from error
    options: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "preserve": not no_preserve,
        "key_norm": not no_key_norm,
        "eps": eps,
        "chains": indices,
    }
    AttnResConfig(**options)
    return options


def _load(name: str, dtype: str | None) -> Loaded:
    kind = cli_models.dtype_of(dtype)
    with _step(f"loading {name}"):
        return cli_models.load(name, kind)


def _load_original(name: str, dtype: str | None) -> Loaded:
    loaded = _load(name, dtype)
    if loaded.options is not None:
        raise InputError(f"{name} is transformed already; give the original model")
    return loaded


def _transformed(
    loaded: Loaded, options: dict[str, Any], mode: Mode, as_json: bool, saved: Path | None = None
) -> tuple[nn.Module, AttnResReport]:
    """The transformed model, made now or read from ``saved``, and its report."""
    if saved is None:
        with _step("transforming" if mode == "off" else f"transforming and checking ({mode})"):
            model = api.transform(loaded.model, loaded.example_inputs, verify=mode, strict=False, **options)
    else:
        given = [name for name, value in asdict(AttnResConfig()).items() if options.get(name, value) != value]
        if given:
            raise OptionError(f"{saved} brings its own {', '.join(given)}, which were saved with it")
        with _step(f"loading {saved}"):
            model = cli_models.restore(loaded, saved)
    report = model.attnres_report
    assert isinstance(report, AttnResReport)
    _require_chains(report, options, as_json)
    return model, report


def _require_chains(report: AttnResReport, options: dict[str, Any], as_json: bool) -> None:
    unknown = set(options["chains"] or ()) - {chain.index for chain in report.chains}
    if report.chains and unknown:
        raise OptionError(f"--chains names {sorted(unknown)}, and {report.model} has {len(report.chains)}, from 0 on")
    if not any(chain.rewritten for chain in report.chains):
        _show(report, as_json)
        raise RefusedError(f"no residual chain of {report.model} qualifies")


def _errors() -> Console:
    return Console(stderr=True, highlight=False)


def _print_error(message: str) -> None:
    _errors().print(Text(f"error: {message}", style="red"), soft_wrap=True)


def _progress(line: str) -> None:
    _errors().print(Text(line), soft_wrap=True)


@contextmanager
def _step(text: str) -> Iterator[None]:
    """A spinner that ends as a line with the time taken; off a terminal one line at the start."""
    console, began = _errors(), time.perf_counter()
    if not console.is_terminal:
        _progress(text)
        yield
        return
    with console.status(Text(text)):
        yield
    console.print(Text.assemble(("✓ ", "green"), text, (f"  {time.perf_counter() - began:.1f} s", "dim")))


def _show(report: AttnResReport, as_json: bool) -> None:
    if as_json:
        print(report.to_json(indent=2))
        return
    # Pipes and logs have no width of their own, and 80 columns would fold the tables.
    console = Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)
    count = f"{len(report.chains)} residual chain{'s' * (len(report.chains) != 1)}"
    console.print(Text(f"{report.model}: {count} ({report.front_end})"))
    for table in tables(report):
        console.print(table)


if __name__ == "__main__":
    main()
