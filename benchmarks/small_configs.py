"""Small configs for transformers' architectures: sizes are shrunk by the names that configs give them.

Nothing here knows an architecture: a size that no name says anything about keeps its default. Where sizes hang together
in ways that no name tells, only the counts of things (layers, tokens, experts) are made smaller, and images.
"""

from __future__ import annotations

import re
from typing import Any

WIDTH, HEADS, KEY_HEADS, HEAD, INNER, LAYERS, VOCABULARY = 32, 4, 2, 8, 64, 2, 128
IMAGE, PATCH, LENGTH, EXPERTS = 32, 8, 64, 4

Sizes = tuple[tuple[str, int], ...]
# The first pattern that the whole name matches decides; these go before the widths.
COUNTS: Sizes = (
    (r"(num_experts_per_tok|moe_top_?k|num_experts_per_token|top_?k|n_activated_experts|\w*moe_k)", 2),
    (r".*(_token_id|_token_index|_idx|_index|_token)", -1),
    (r".*(vocab_size|vocabulary_size|num_embeddings|vocab)(_\w+)?", VOCABULARY),
    (r"(num_hidden_layers|n_layers?|num_layers|\w*(encoder|decoder|text|vision)_layers|depth|num_\w*layers)", LAYERS),
    (r"(num_\w*hidden_layers|\w+_num_hidden_layers|\w+_depth|num_blocks|layers)", LAYERS),
    (r"(\w*num_(local_|routed_|shared_)?experts|n_routed_experts|\w*num_experts|moe_num_experts)", EXPERTS),
    (r"(n_group|topk_group|n_groups|num_groups|mamba_n_groups|num_expert_groups?|moe_topk_group)", 1),
)
IMAGES: Sizes = ((r"(image_size|input_size|img_size|resolution)", IMAGE),)
WIDTHS: Sizes = (
    (r"(num_key_value_heads|num_kv_heads|n_kv_heads|\w+_key_value_heads|num_key_value_groups|\w*kv_heads)", KEY_HEADS),
    (r".*(attention_heads|num_heads|n_heads?|num_attn_heads|query_heads|n_head|heads)", HEADS),
    (r"qk_head_dim", 2 * HEAD),
    (r"rotary_dim", HEAD // 2),
    (r"\w*expand", 1),
    (r"(qk_)?(rope|nope)_head_dim|v_head_dim|\w*head_dim|d_kv|attention_head_size|d_head|\w*head_size", HEAD),
    (r"(n_inner|ffn_dim|d_ff|d_inner|\w*intermediate_(size|dim)|\w*ffn_(dim|hidden_size|size)|\w*mlp_dim)", INNER),
    (r"(feed_forward_\w+|\w*ffn_intermediate\w*|intermediate_\w+_size|fc_dim|dim_feedforward|d_mlp)", INNER),
    (r"(\w*hidden_size|d_model|n_embd|\w*hidden_dim|\w*embed_dim|dim|\w*embedding_(size|dim)|d_embed)", WIDTH),
    (r"(model_dim|width|n_embed|\w+_dim|lru_width|conv_hidden_size|\w*channels?_dim|d_embedding|\w+_width)", WIDTH),
    (r"(upsample_groups)", WIDTH),
    (r"(q_lora_rank|kv_lora_rank|\w*lora_rank|\w*_rank|time_step_rank)", 16),
    *IMAGES,
    (r"(patch_size|shape_size)", PATCH),
    (r"(coordinate_size)", PATCH // 2),
    (r"(max_position_embeddings|n_positions|max_sequence_length|\w*max_(source|target)_positions|n_ctx)", LENGTH),
    (r"(\w*max_length|max_seq_len|\w*max_2d_position_embeddings|context_length|context_size)", LENGTH),
    (r"(sliding_window|local_attention|attention_window|window_size)", 8),
    (r"(state_size|\w*d_state|ssm_state_size)", 8),
    (r"(\w*chunk_size|\w*block_size)", 8),
    (r"(query_pre_attn_scalar)", HEAD),
)
# The smallest first.
SMALL = COUNTS + WIDTHS
FORMS = (SMALL, COUNTS + IMAGES, COUNTS, ())
# A config may leave these to its user.
UNSET = {"vocab_size": VOCABULARY, "num_experts_per_tok": 2, "n_routed_experts": EXPERTS, "n_shared_experts": 1}
TOKENS = {"pad_token_id": 1, "mask_token_id": 2}
# Layer-wise lists: what is said for each layer is said for fewer.
PER_LAYER = re.compile(r"(\w*layer_types|layers_block_type|\w*_layers|\w*layer_pattern|mlp_layer_types|block_types)")
STAGES = re.compile(r"(hidden_sizes|\w*embed_dims?|\w*channels|neck_hidden_sizes|backbone_out_channels|dims?)")


def shrunk(config: Any, sizes: Sizes = SMALL) -> Any:
    """A config of the same class whose sizes are small where its names say what they are.

    Args:
        config: any; it stays as it is.
        sizes: one of ``FORMS``; with none of them the config stays as it is.
    """
    return config if not sizes else type(config)(**_changed(config, sizes))


def _changed(config: Any, sizes: Sizes) -> dict[str, Any]:
    parts = getattr(config, "sub_configs", {})
    changed: dict[str, Any] = {}
    layers = vars(config).get("num_hidden_layers")  # and no other name for a count of stages
    kinds = getattr(config, "layer_types", None) or []
    depth = max(LAYERS, len(set(kinds)))
    # A count of stages, whose lists are not cut, stays.
    lists = {key: value for key, value in vars(config).items() if isinstance(value, list | tuple)}
    lengths = {len(value) for key, value in lists.items() if not PER_LAYER.fullmatch(key)}
    for name, value in vars(config).items():
        if name.startswith("_") or name in ("transformers_version", "architectures", "model_type"):
            continue
        if name in parts:
            if value is not None and not isinstance(value, dict):
                changed[name] = shrunk(value, sizes)
            continue
        unset = UNSET if sizes is SMALL else UNSET | TOKENS
        new = unset.get(name) if value is None else _value(name, value, sizes)
        if isinstance(value, list | tuple) and len(value) == layers and not isinstance(value[0], str):
            new = type(value)(_value(name, item, sizes) for item in value[:depth])
        if name == "num_hidden_layers" and isinstance(value, int):
            new = min(value, depth)
        elif isinstance(value, int) and not isinstance(value, bool) and value in lengths and new == LAYERS:
            new = value
        if sizes is SMALL:
            new = _for_small_heads(config, name, value, new)
        if new is not value:
            changed[name] = new
    return changed


def _for_small_heads(config: Any, name: str, value: Any, new: Any) -> Any:
    if "key_value_heads" in name or "kv_heads" in name:
        heads = getattr(config, "num_attention_heads", None)
        return HEADS if value is None or value == heads else new
    if name == "head_dim" and value is None:
        return HEAD
    if (
        name == "rope_parameters"
        and isinstance(value, dict)
        and "mrope_section" in (value.keys() | set(getattr(config, "ignore_keys_at_rope_validation", ()) or ()))
    ):
        # Times, heights and widths share the pairs of a head's dimensions.
        return {**value, "partial_rotary_factor": 1.0, "mrope_section": [HEAD // 4, HEAD // 8, HEAD // 8]}
    return new


def _value(name: str, value: Any, sizes: Sizes) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        size = _size(name, sizes)
        if size == -1:
            return value if value < VOCABULARY else 3
        return value if size is None or value <= size else size
    if isinstance(value, list | tuple) and value:
        if name in ("depths", "layers_per_stage", "num_blocks", "num_layers", "layer_depths"):
            return type(value)(LAYERS for _ in value)
        if PER_LAYER.fullmatch(name) and isinstance(value[0], str):
            kinds = list(dict.fromkeys(value))
            return (kinds + list(value)[-LAYERS:])[: max(LAYERS, len(kinds))]
        if sizes is not COUNTS and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            size = _size(name, sizes if sizes is SMALL else IMAGES)
            if size == HEADS:
                return type(value)(HEADS for _ in value)
            if size is not None and size > 0:
                return type(value)(min(item, size) for item in value)
            if sizes is SMALL and STAGES.fullmatch(name):
                return type(value)(min(item, WIDTH) for item in value)
    return value


def _size(name: str, sizes: Sizes) -> int | None:
    return next((size for pattern, size in sizes if re.fullmatch(pattern, name)), None)
