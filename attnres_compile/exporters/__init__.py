"""Deployable files from models that hold the depth-attention operators; each exporter's dependencies are optional."""

from attnres_compile.exporters.onnx import OnnxExport, export_onnx
from attnres_compile.exporters.onnx_decoder import export_onnx_decoder

__all__ = ["OnnxExport", "export_onnx", "export_onnx_decoder"]
