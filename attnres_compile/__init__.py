"""Attention Residuals (arXiv 2603.15031) for any PyTorch model: a compiler pass over its residual stream."""

from attnres_compile import ops
from attnres_compile.api import inspect, pass_by_pass, transform, verify
from attnres_compile.backends import AttnResBackend
from attnres_compile.checkpoint_names import export_reads, import_reads
from attnres_compile.config import AttnResConfig
from attnres_compile.errors import (
    AttnResError,
    CaptureError,
    ExportError,
    InputError,
    MissingDependencyError,
    OptionError,
    RefusedError,
    VerificationError,
)
from attnres_compile.exporters import export_onnx, export_onnx_decoder, export_tensorrt
from attnres_compile.pretrained import from_pretrained, save_pretrained
from attnres_compile.report import AttnResReport
from attnres_compile.training import optimizer_groups, read_modules, trainable_parameters

__version__ = "0.1.0"

__all__ = [
    "AttnResBackend",
    "AttnResConfig",
    "AttnResError",
    "AttnResReport",
    "CaptureError",
    "ExportError",
    "InputError",
    "MissingDependencyError",
    "OptionError",
    "RefusedError",
    "VerificationError",
    "export_onnx",
    "export_onnx_decoder",
    "export_reads",
    "export_tensorrt",
    "from_pretrained",
    "import_reads",
    "inspect",
    "ops",
    "optimizer_groups",
    "pass_by_pass",
    "read_modules",
    "save_pretrained",
    "trainable_parameters",
    "transform",
    "verify",
]
