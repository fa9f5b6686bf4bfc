"""The types of the depth-attention nodes in an ONNX file, by which functions and TensorRT plugins are found.

A type's name carries its numbers of sources and reads, since TensorRT's parser looks functions up by name alone and
plugins have fixed signatures. Importing this module needs nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

DOMAIN: Final = "attnres_compile"
PLUGIN_VERSION: Final = "1"

DEPTH_ATTENTION: Final = "DepthAttentionN"
INTER_BLOCK: Final = "InterBlockN"
MERGE: Final = "Merge"
_NORMS: Final = {"rms": "RMSNorm", "layer": "LayerNorm"}
_TYPE: Final = re.compile(
    rf"{DEPTH_ATTENTION}(?P<read>[1-9]\d*)"
    rf"|{INTER_BLOCK}(?P<blocks>[1-9]\d*)S(?P<reads>[1-9]\d*)"
    rf"|{MERGE}"
    rf"|(?P<add>Add)?{MERGE}(?P<norm>{'|'.join(_NORMS.values())})"
)
FORMS: Final = "DepthAttentionN<n>, InterBlockN<n>S<s>, Merge, (Add)MergeRMSNorm and (Add)MergeLayerNorm"


@dataclass(frozen=True)
class NodeType:
    """What a type's name says.

    Attributes:
        operator: the part of the name without numbers, or ``MERGE`` with whatever is fused to it.
        sources: number of sources or blocks; 0 for a merge.
        reads: of a block's first phase; 0 otherwise.
        norm: ``"rms"`` or ``"layer"``, where a merge has one after it.
        add: a residual add comes before the merge.
    """

    operator: str
    sources: int = 0
    reads: int = 0
    norm: str | None = None
    add: bool = False


def node_type(name: str) -> NodeType | None:
    """What a node's type says, or None where it is none of ours."""
    found = _TYPE.fullmatch(name)
    if found is None:
        return None
    if found["read"]:
        return NodeType(DEPTH_ATTENTION, int(found["read"]))
    if found["blocks"]:
        return NodeType(INTER_BLOCK, int(found["blocks"]), int(found["reads"]))
    norm = next((kind for kind, text in _NORMS.items() if text == found["norm"]), None)
    return NodeType(MERGE, norm=norm, add=bool(found["add"]))


def depth_attention_name(sources: int) -> str:
    """The type of the node that is one read."""
    return f"{DEPTH_ATTENTION}{sources}"


def inter_block_name(blocks: int, reads: int) -> str:
    """The type of the node that computes a block's first phase."""
    return f"{INTER_BLOCK}{blocks}S{reads}"


def merge_norm_name(norm: str, *, add: bool) -> str:
    """The type of the node that is a merge, the norm after it (``"rms"`` or ``"layer"``) and the add before it."""
    return f"{'Add' if add else ''}{MERGE}{_NORMS[norm]}"
