"""Models by name: how the command line loads one, saves it transformed, and gets it back.

Weights come from safetensors and GGUF files, which hold no code; pickles and code beside the weights are never run.
"""

from __future__ import annotations

import copy
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attnres_compile import pretrained
from attnres_compile.errors import InputError, MissingDependencyError, OptionError
from attnres_compile.pretrained import CONFIG, RECORD, as_input_error, has_options, saved_options
from attnres_compile.report import AttnResReport

FORMS: Final = "package.module:callable, hf:DIRECTORY or timm:NAME"

# Everything that a tokenizer or a processor is made of; save_pretrained writes the rest.
_TOKENIZER: Final = (
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "*processor_config.json",
)


@dataclass(frozen=True)
class Loaded:
    """A model that a name stands for.

    Attributes:
        name: what the user wrote.
        model: the model, in eval mode.
        example_inputs: what came with it, or None.
        directory: where a Hugging Face model was read.
        gguf: the file in it, if it was read from GGUF.
        options: the options it was transformed with before it was saved, or None for an original.
    """

    name: str
    model: nn.Module
    example_inputs: Any = None
    directory: Path | None = None
    gguf: str | None = None
    options: dict[str, Any] | None = None


def dtype_of(name: str | None) -> torch.dtype | None:
    """The floating-point dtype of that name.

    Raises:
        OptionError: there is none.
    """
    found = getattr(torch, name, None) if name else None
    if name and not (isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize > 1):
        raise OptionError(f"--dtype takes float64, float32, bfloat16 or float16, got {name!r}")
    return found


def load(name: str, dtype: torch.dtype | None = None) -> Loaded:
    """Load the model that a name stands for.

    Args:
        name: ``package.module:callable``, ``hf:DIRECTORY`` or ``timm:NAME``.
        dtype: of its floating-point parameters; None leaves them as they are stored.

    Raises:
        InputError: the name leads to no model.
        MissingDependencyError: loading it needs a package that is not installed.
    """
    kind, colon, rest = name.partition(":")
    if not colon or not kind or not rest:
        hint = f"; for a local Hugging Face model write hf:{name}" if Path(name).exists() else ""
        raise InputError(f"{name!r} is not the name of a model: give {FORMS}{hint}")
    if kind == "hf":
        return _hugging_face(name, Path(rest).expanduser(), dtype)
    model, inputs = _timm(rest) if kind == "timm" else _called(kind, rest)
    if dtype is not None:
        model = model.to(dtype)
        inputs = pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)
    return Loaded(name, model.eval(), inputs)


def save(loaded: Loaded, model: nn.Module, options: dict[str, Any], report: AttnResReport, folder: Path) -> None:
    """Write a transformed model, and its options and report, into a folder.

    Raises:
        AttnResError: the weights cannot be written as safetensors.
    """
    pretrained.save_pretrained(model, folder)
    if pretrained.is_pretrained(model):
        _save_tokenizer(loaded, folder)
    pretrained.write_record(folder, {"model": loaded.name, "options": options, "report": report.to_dict()})


def restore(original: Loaded, folder: Path) -> nn.Module:
    """The transformed model that ``save`` wrote, without verification.

    Args:
        original: the model it was made from; it is left as it is.
        folder: where it was saved.

    Raises:
        InputError: what the folder holds is no transformed model of this original.
    """
    options = saved_options(folder)
    if pretrained.is_pretrained(original.model):
        model = pretrained.load_class(type(original.model), folder, next(original.model.parameters()).dtype)
    else:
        model = copy.deepcopy(original.model)
    return pretrained.restored(model, folder, options, original.example_inputs, original.name)


@contextmanager
def new_directory(target: Path, force: bool) -> Iterator[Path]:
    """A folder beside ``target`` that takes its name when all went well, and is gone otherwise.

    It is made before the long work, since the place may not be writable.

    Args:
        target: a directory that does not exist or is empty.
        force: also one that ``save`` filled, which is then replaced.

    Raises:
        InputError: ``target`` is something else, or cannot be made.
    """
    target = target.absolute()
    if target.exists() and not target.is_dir():
        raise InputError(f"cannot write {target}: it is a file")
    if target.is_dir() and any(target.iterdir()):
        if not (target / RECORD).is_file():
            raise InputError(f"{target} is not empty, and `attnres transform` did not write it; give another directory")
        if not force:
            raise InputError(f"{target} holds a transformed model already; --force replaces it")
    folder = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        folder.mkdir()
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror} ({target.parent})") from error
    try:
        yield folder
        old = target.with_name(f".{target.name}.{os.getpid()}.old")
        if target.exists():
            target.rename(old)
        folder.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def require_writable(path: Path) -> None:
    """Find out before the long work that a file cannot be written.

    Raises:
        InputError: it cannot.
    """
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a directory")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror} ({path.parent})") from error


def _called(module_name: str, attribute: str) -> tuple[nn.Module, Any]:
    # A console script finds its own folder on the path, not the one that the user is in.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise InputError(f"importing {module_name} failed: {error}") from error
        raise InputError(
            f"there is no module {error.name!r}; looked in the current directory and in installed packages ({FORMS})"
        ) from error
    except Exception as error:
        raise InputError(f"importing {module_name} failed: {type(error).__name__}: {error}") from error
    try:
        found = attrgetter(attribute)(module)
    except AttributeError as error:
        raise InputError(f"module {module_name} has no {attribute!r}") from error
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise InputError(f"{module_name}:{attribute} is of type {type(found).__name__}, and no callable")
        # A callable that initialises at random makes the same model in every command.
        torch.manual_seed(0)
        with as_input_error(f"{module_name}:{attribute}() failed"):
            found = found()
    model, inputs = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{module_name}:{attribute}() returned something of type {type(found).__name__}; a torch.nn.Module is "
            "expected, or a pair of a module and its example inputs"
        )
    return model, inputs


def _timm(name: str) -> tuple[nn.Module, Any]:
    try:
        timm = importlib.import_module("timm")
    except ImportError as error:
        raise MissingDependencyError(f"timm:{name} needs timm, which cannot be imported: pip install timm") from error
    torch.manual_seed(0)
    with as_input_error(f"timm cannot make {name!r}"):
        model: nn.Module = timm.create_model(name, pretrained=False)
        settings: Any = model.pretrained_cfg
        return model, torch.randn(2, *settings["input_size"])


def _hugging_face(name: str, path: Path, dtype: torch.dtype | None) -> Loaded:
    if path.suffix == ".gguf" and path.is_file():
        return _from_gguf(name, path, dtype)
    if not path.is_dir():
        raise InputError(
            f"{path} is neither a directory nor a .gguf file; hf: takes local files only, nothing is downloaded"
        )
    files = sorted(path.glob("*.gguf"))
    if (path / CONFIG).is_file():
        _transformers()
        options = saved_options(path) if any(has_options(path, name) for name in (RECORD, CONFIG)) else None
        return Loaded(name, pretrained.load_original(path, dtype), None, path, options=options)
    if len(files) == 1:
        return _from_gguf(name, files[0], dtype)
    if files:
        listing = ", ".join(file.name for file in files)
        raise InputError(f"{path} holds several GGUF files ({listing}): name one, as hf:{files[0]}")
    raise InputError(f"{path} holds no model: a config.json with safetensors, or one GGUF file, is expected")


def _from_gguf(name: str, file: Path, dtype: torch.dtype | None) -> Loaded:
    transformers = _transformers()
    try:
        importlib.import_module("gguf")
    except ImportError as error:
        raise MissingDependencyError(f"{file} needs gguf: pip install 'attnres-compile[hf]'") from error
    # Where transformers can keep weights packed, these would be no parameters.
    config = getattr(transformers, "GgufConfig", None)
    unpacked = {"quantization_config": config(dequantize=True)} if config else {}
    with as_input_error(f"{file} cannot be loaded"), _no_bar("transformers.modeling_gguf_pytorch_utils"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            local_files_only=True,
            trust_remote_code=False,
            dtype=dtype or torch.float32,
            **unpacked,
        )
    return Loaded(name, model.eval(), None, file.parent, file.name)


@contextmanager
def _no_bar(name: str) -> Iterator[None]:
    """Silence the progress bar of a module that transformers' own setting does not reach."""
    module: Any = importlib.import_module(name)
    bar = getattr(module, "tqdm", None)
    module.tqdm = bar and partial(bar, disable=True)
    try:
        yield
    finally:
        module.tqdm = bar


def _save_tokenizer(loaded: Loaded, folder: Path) -> None:
    if loaded.directory is None:
        return
    if loaded.gguf is None:
        for pattern in _TOKENIZER:
            for file in loaded.directory.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, folder / file.name)
        return
    with as_input_error(f"the tokenizer of {loaded.gguf} cannot be read"):
        tokenizer = _transformers().AutoTokenizer.from_pretrained(
            loaded.directory, gguf_file=loaded.gguf, local_files_only=True, trust_remote_code=False
        )
        tokenizer.save_pretrained(folder)


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingDependencyError("hf: needs transformers: pip install 'attnres-compile[hf]'") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
