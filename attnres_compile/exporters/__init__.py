"""Deployable files from models that hold the depth-attention operators; each exporter's dependencies are optional."""

from attnres_compile.exporters.onnx import OnnxExport, export_onnx

__all__ = ["OnnxExport", "export_onnx"]
