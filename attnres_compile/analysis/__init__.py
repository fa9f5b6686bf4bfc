"""What a transformed model does with its depth: measurements, mixing matrices, pictures, logs."""

from attnres_compile.analysis.logger import DepthLogger
from attnres_compile.analysis.measure import ChainMeasure, Measurement, ReadMeasure, SublayerMeasure, measure
from attnres_compile.analysis.mixing import denseformer, doubly_stochastic, highway, hyper_connections, residual

__all__ = [
    "ChainMeasure",
    "DepthLogger",
    "Measurement",
    "ReadMeasure",
    "SublayerMeasure",
    "denseformer",
    "doubly_stochastic",
    "highway",
    "hyper_connections",
    "measure",
    "residual",
]
