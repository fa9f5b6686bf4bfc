"""Small models whose residual streams are written in odd ways: the test material for what a program may look like.

Each takes one float tensor [batch, length, 5] and returns a tensor, and works for any batch and any length.
"""

from tests.programs import arithmetic, checkpoints, hostile, layers, python, shapes, streams
from tests.programs.parts import FEATURES, Program

__all__ = ["FEATURES", "PROGRAMS", "Program"]

PROGRAMS: dict[str, Program] = {}
for module in (layers, checkpoints, arithmetic, streams, shapes, python, hostile):
    assert not PROGRAMS.keys() & module.PROGRAMS.keys()
    PROGRAMS |= module.PROGRAMS
