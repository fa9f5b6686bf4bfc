"""Deployable files from models that hold the depth-attention operators; each exporter's dependencies are optional."""

from attnres_compile.exporters.onnx import OnnxExport, export_onnx
from attnres_compile.exporters.onnx_decoder import export_onnx_decoder
from attnres_compile.exporters.tensorrt import TensorRTExport, export_tensorrt
from attnres_compile.exporters.tensorrt_plugins import register_plugins

__all__ = [
    "OnnxExport",
    "TensorRTExport",
    "export_onnx",
    "export_onnx_decoder",
    "export_tensorrt",
    "register_plugins",
]
