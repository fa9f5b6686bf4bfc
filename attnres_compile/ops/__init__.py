"""The depth-attention operators ``attnres_compile::*`` and the reference they are tested against."""

from attnres_compile.ops.accumulate import accumulate
from attnres_compile.ops.add_merge_norm import add_merge_norm
from attnres_compile.ops.depth_attention import depth_attention
from attnres_compile.ops.inter_block import inter_block
from attnres_compile.ops.merge import merge
from attnres_compile.ops.merge_norm import merge_norm

__all__ = ["accumulate", "add_merge_norm", "depth_attention", "inter_block", "merge", "merge_norm"]
