"""Small configs for transformers' architectures: sizes are shrunk by the names that configs give them.

Nothing here knows an architecture: a size that no name says anything about keeps its default.
"""

from __future__ import annotations

import re
from typing import Any

WIDTH, HEADS, KEY_HEADS, HEAD, INNER, LAYERS, VOCABULARY = 32, 4, 2, 8, 64, 2, 128
IMAGE, PATCH, LENGTH, EXPERTS = 32, 8, 64, 4

# The first pattern that the whole name matches decides.
SIZES: tuple[tuple[str, int], ...] = (
    (r".*(_token_id|_token_index|_idx|_index|_token)", -1),
    (r".*(vocab_size|vocabulary_size|num_embeddings|vocab)(_\w+)?", VOCABULARY),
    (r"(num_key_value_heads|num_kv_heads|n_kv_heads|\w+_key_value_heads|num_key_value_groups|\w*kv_heads)", KEY_HEADS),
    (r".*(attention_heads|num_heads|n_heads?|num_attn_heads|query_heads|n_head|heads)", HEADS),
    (r"qk_head_dim", 2 * HEAD),
    (r"rotary_dim", HEAD // 2),
    (r"\w*expand", 1),
    (r"(qk_)?(rope|nope)_head_dim|v_head_dim|\w*head_dim|d_kv|attention_head_size|d_head|\w*head_size", HEAD),
    (r"(num_hidden_layers|n_layers?|num_layers|\w*(encoder|decoder|text|vision)_layers|depth|num_\w*layers)", LAYERS),
    (r"(num_\w*hidden_layers|\w+_num_hidden_layers|\w+_depth|num_blocks|layers)", LAYERS),
    (r"(n_inner|ffn_dim|d_ff|d_inner|\w*intermediate_(size|dim)|\w*ffn_(dim|hidden_size|size)|\w*mlp_dim)", INNER),
    (r"(feed_forward_\w+|\w*ffn_intermediate\w*|intermediate_\w+_size|fc_dim|dim_feedforward|d_mlp)", INNER),
    (r"(\w*hidden_size|d_model|n_embd|\w*hidden_dim|\w*embed_dim|dim|\w*embedding_(size|dim)|d_embed)", WIDTH),
    (r"(model_dim|width|n_embed|\w+_dim|lru_width|conv_hidden_size|\w*channels?_dim|d_embedding|\w+_width)", WIDTH),
    (r"(q_lora_rank|kv_lora_rank|\w*lora_rank|\w*_rank|time_step_rank)", 16),
    (r"(num_experts_per_tok|moe_top_?k|num_experts_per_token|top_?k|n_activated_experts|\w*moe_k)", 2),
    (r"(\w*num_(local_|routed_|shared_)?experts|n_routed_experts|\w*num_experts|moe_num_experts)", EXPERTS),
    (r"(n_group|topk_group|n_groups|num_groups|mamba_n_groups|num_expert_groups?|moe_topk_group)", 1),
    (r"(image_size|input_size|img_size|resolution)", IMAGE),
    (r"(patch_size)", PATCH),
    (r"(max_position_embeddings|n_positions|max_sequence_length|\w*max_(source|target)_positions|n_ctx)", LENGTH),
    (r"(\w*max_length|max_seq_len|\w*max_2d_position_embeddings|context_length)", LENGTH),
    (r"(sliding_window|local_attention|attention_window|window_size)", 8),
    (r"(state_size|\w*d_state|ssm_state_size)", 8),
    (r"(\w*chunk_size|\w*block_size)", 8),
    (r"(query_pre_attn_scalar)", HEAD),
)
# Layer-wise lists: what is said for each layer is said for fewer.
PER_LAYER = re.compile(r"(\w*layer_types|layers_block_type|\w*_layers|\w*layer_pattern|mlp_layer_types|block_types)")
STAGES = re.compile(r"(hidden_sizes|\w*embed_dims?|\w*channels|neck_hidden_sizes|backbone_out_channels|dims?)")


def shrunk(config: Any) -> Any:
    """A config of the same class whose sizes are small where its names say what they are."""
    kind = type(config)
    return kind(**_changed(config))


def _changed(config: Any) -> dict[str, Any]:
    parts = getattr(config, "sub_configs", {})
    changed: dict[str, Any] = {}
    layers = getattr(config, "num_hidden_layers", None)
    kinds = getattr(config, "layer_types", None) or []
    depth = max(LAYERS, len(set(kinds)))
    for name, value in vars(config).items():
        if name.startswith("_") or name in ("transformers_version", "architectures", "model_type"):
            continue
        if name in parts:
            if value is not None and not isinstance(value, dict):
                changed[name] = shrunk(value)
            continue
        new = _value(name, value)
        if isinstance(value, list) and len(value) == layers and not isinstance(value[0], str):
            new = [_value(name, item) for item in value[:depth]]
        if name == "num_hidden_layers" and isinstance(value, int):
            new = min(value, depth)
        if "key_value_heads" in name or "kv_heads" in name:
            heads = getattr(config, "num_attention_heads", None)
            new = HEADS if value is None or value == heads else new
        if name == "head_dim" and value is None:
            new = HEAD
        if new is not value:
            changed[name] = new
    return changed


def _value(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        size = _size(name)
        if size == -1:
            return value if value < VOCABULARY else 3
        return value if size is None or value <= size else size
    if isinstance(value, list | tuple) and value:
        if name in ("depths", "layers_per_stage", "num_blocks", "num_layers", "layer_depths"):
            return type(value)(LAYERS for _ in value)
        if PER_LAYER.fullmatch(name) and isinstance(value[0], str):
            kinds = list(dict.fromkeys(value))
            return (kinds + list(value)[-LAYERS:])[: max(LAYERS, len(kinds))]
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            size = _size(name)
            if size == HEADS:
                return type(value)(HEADS for _ in value)
            if size is not None and size > 0:
                return type(value)(min(item, size) for item in value)
            if STAGES.fullmatch(name):
                return type(value)(min(item, WIDTH) for item in value)
    return value


def _size(name: str) -> int | None:
    return next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
