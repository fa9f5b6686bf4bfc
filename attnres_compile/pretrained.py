"""Transformed models on disk: weights as safetensors, options as JSON beside them, no code in either.

A Hugging Face model keeps its options under ``attnres`` in ``config.json``, which ``save_pretrained`` writes, so that
trainers save them too. Any other module has them in ``attnres.json``. Loading analyses the model again.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from attnres_compile import api
from attnres_compile.attach import ATTRIBUTE
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import AttnResError, InputError, MissingDependencyError
from attnres_compile.report import AttnResReport

RECORD: Final = "attnres.json"
WEIGHTS: Final = "model.safetensors"
CONFIG: Final = "config.json"


def save_pretrained(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write a transformed model: its weights as safetensors, its options and report as JSON.

    For a Hugging Face model its own ``save_pretrained`` is enough; this adds the report.

    Args:
        model: what ``transform`` returned, trained or not.
        directory: made if it does not exist; files of the same names are replaced.

    Raises:
        InputError: the model was not transformed.
        AttnResError: its weights cannot be written as safetensors.
        MissingDependencyError: safetensors is not installed.
    """
    report = getattr(model, "attnres_report", None)
    if not isinstance(report, AttnResReport) or ATTRIBUTE not in dict(model.named_children()):
        raise InputError(f"{type(model).__name__} was not transformed: pass what attnres_compile.transform returned")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    if is_pretrained(model):
        model.save_pretrained(folder)  # type: ignore[operator]
    else:
        tensors, partly = _safetensors(), folder / f".{WEIGHTS}.{os.getpid()}"
        try:
            tensors.save_model(model, str(partly))
            partly.replace(folder / WEIGHTS)
        except (RuntimeError, ValueError, AttributeError) as error:
            raise AttnResError(f"{type(model).__name__} cannot be saved as safetensors: {error}") from error
        finally:
            partly.unlink(missing_ok=True)
    write_record(folder, {"options": report.options, "report": report.to_dict()})


def from_pretrained(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    example_inputs: Any = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Bring a transformed model back, in eval mode.

    Only local safetensors files and JSON are read; no code beside the weights is run.

    Args:
        directory: what ``save_pretrained`` wrote, transformers' own or this module's.
        model: the original architecture, for models that are not transformers' own. It is copied, and its weights
            are replaced by the saved ones.
        example_inputs: as for ``transform``.
        dtype: of a Hugging Face model's parameters; None leaves them as they are stored.

    Raises:
        InputError: the directory holds no transformed model, or not one of this architecture.
        MissingDependencyError: transformers or safetensors is needed and not installed.
    """
    folder = Path(directory)
    options = saved_options(folder)
    if model is not None:
        original = copy.deepcopy(model)
    elif (folder / CONFIG).is_file():
        original = load_original(folder, dtype)
    else:
        raise InputError(f"{folder} holds no {CONFIG} to make the model from; pass the original architecture as model=")
    return restored(original, folder, options, example_inputs, type(original).__name__)


def restored(original: nn.Module, folder: Path, options: dict[str, Any], example_inputs: Any, name: str) -> nn.Module:
    """Transform a model itself by saved options, without verification, and load the saved weights.

    Args:
        original: a Hugging Face model has its own weights already; another module gets them here.
        folder: what ``save_pretrained`` wrote.
        options: of the transformation.
        example_inputs: as for ``transform``.
        name: of the model, in errors.

    Raises:
        InputError: the weights do not fit.
    """
    model = api.transform(original, example_inputs, inplace=True, verify="off", **options)
    tensors = _safetensors()
    with as_input_error(f"the weights in {folder} do not fit {name}"):
        if not is_pretrained(model):
            tensors.load_model(model, folder / WEIGHTS)
        else:
            reads = {
                key.removeprefix(f"{ATTRIBUTE}."): value
                for file in sorted(folder.glob("*.safetensors"))
                for key, value in tensors.load_file(file).items()
                if key.startswith(f"{ATTRIBUTE}.")
            }
            model.get_submodule(ATTRIBUTE).load_state_dict(reads)
    return model.eval()


def saved_options(folder: Path) -> dict[str, Any]:
    """The options of the transformed model in a folder.

    Raises:
        InputError: there is none, or its record cannot be read.
    """
    file = next((folder / name for name in (RECORD, CONFIG) if has_options(folder, name)), None)
    if file is None:
        raise InputError(
            f"{folder} holds no {RECORD}, and no {CONFIG} with {ATTRIBUTE!r} in it: give a directory that a "
            "transformed model was saved to"
        )
    try:
        options = dict(json.loads(file.read_text(encoding="utf-8"))["options" if file.name == RECORD else ATTRIBUTE])
        config = AttnResConfig(**options)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    return {key: value for key, value in asdict(config).items() if key in options}


def has_options(folder: Path, name: str) -> bool:
    """Whether the file of that name says how a model was transformed."""
    file = folder / name
    if name == RECORD or not file.is_file():
        return file.is_file()
    try:
        return ATTRIBUTE in json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write ``attnres.json``, whole or not at all."""
    partly = folder / f".{RECORD}.{os.getpid()}"
    partly.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    partly.replace(folder / RECORD)


def load_original(folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """A Hugging Face model of the class that its ``config.json`` names, without the reads.

    Raises:
        InputError: there is none, or it cannot be loaded from safetensors.
    """
    transformers = _transformers()
    with as_input_error(f"{folder / CONFIG} cannot be used"):
        # False and not None: on a terminal None asks whether to run the code beside the weights.
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    architectures = [getattr(transformers, name, None) for name in config.architectures or ()]
    cls = next((found for found in architectures if found is not None), transformers.AutoModel)
    return load_class(cls, folder, dtype)


def load_class(cls: Any, folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """A Hugging Face model of that class from safetensors, in eval mode; every weight must be there.

    Raises:
        InputError: it cannot be loaded.
    """
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"{folder} holds no safetensors files; other formats are not read, since they can run code")
    with as_input_error(f"{folder} cannot be loaded"), _quiet():
        model, info = cls.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=dtype or "auto",
            output_loading_info=True,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(f"{folder} lacks {len(missing)} weights of {type(model).__name__}, the first is {missing[0]}")
    loaded: nn.Module = model.eval()
    return loaded


def is_pretrained(model: nn.Module) -> bool:
    """Whether it is a Hugging Face model."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


@contextmanager
def as_input_error(what: str) -> Iterator[None]:
    """Other people's code fails in any way: the user gets what was attempted, and the first line of what it said."""
    try:
        yield
    except AttnResError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise InputError(f"{what}: {type(error).__name__}: {lines[0]}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' remarks on the reads, which its class does not know, and as talkative as before after."""
    logging = _transformers().logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise MissingDependencyError("this model needs transformers: pip install 'attnres-compile[hf]'") from error


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise MissingDependencyError("saved weights need safetensors: pip install 'attnres-compile[hf]'") from error
