"""The types of nodes: what their names say comes back from them."""

import pytest

from attnres_compile.exporters.node_types import (
    DEPTH_ATTENTION,
    INTER_BLOCK,
    MERGE,
    NodeType,
    depth_attention_name,
    inter_block_name,
    merge_norm_name,
    node_type,
)


@pytest.mark.parametrize(
    "name, kind",
    [
        (depth_attention_name(12), NodeType(DEPTH_ATTENTION, 12)),
        (inter_block_name(3, 10), NodeType(INTER_BLOCK, 3, 10)),
        (MERGE, NodeType(MERGE)),
        (merge_norm_name("rms", add=False), NodeType(MERGE, norm="rms")),
        (merge_norm_name("layer", add=True), NodeType(MERGE, norm="layer", add=True)),
    ],
)
def test_a_name_says_its_type(name: str, kind: NodeType) -> None:
    assert node_type(name) == kind


@pytest.mark.parametrize(
    "name", ["DepthAttentionN0", "DepthAttentionN", "InterBlockN3", "AddMerge", "MergeNorm", "Add"]
)
def test_other_names_are_none_of_ours(name: str) -> None:
    assert node_type(name) is None
