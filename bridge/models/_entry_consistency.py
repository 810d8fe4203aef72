"""Checks of compressed attention, hyper-connections and experts by token id."""

from __future__ import annotations

from bridge.models._compressed_attention_config import CompressedAttentionConfig
from bridge.models._decoder_fields import COMPRESSIONS, DecoderFields

_NOT_BESIDE_ENTRIES = (
    *("mla", "indexer", "full_attention", "kv_sharing", "qk_norm", "value_norm"),
    *("attention_bias", "attention_out_bias", "attention_gate", "clip_qkv"),
    *("query_pre_attn_scalar", "attention_multiplier", "attn_logit_softcapping"),
    *("query_scale", "no_rope_layers", "multipliers"),
)
_NOT_BESIDE_STREAMS = (
    *("altup", "per_layer_input", "laurel_rank", "layer_scale", "kv_sharing"),
    "mixer_only_layers",
)


def inconsistent_entries(config: DecoderFields) -> list[str]:
    """Returns what contradicts compressed attention; empty if nothing.

    Args:
      config: Config, with fields of their types and positive sizes.
    """
    sizes, types = config.compressed_attention, set(config.layer_types or ())
    if sizes is None:
        return [
            f"layer_types have {name}, but compressed_attention is None"
            for name in sorted(types & COMPRESSIONS.keys())
        ]
    wrong = [
        f"compressed_attention: not beside {name}"
        for name in _NOT_BESIDE_ENTRIES
        if getattr(config, name) not in (None, False, ())
    ]
    if not types or types - {"sliding_attention", *COMPRESSIONS}:
        wrong.append(
            "compressed_attention: layer_types are sliding_attention, "
            f"{' or '.join(sorted(COMPRESSIONS))} for each layer"
        )
    if config.sliding_window is None:
        wrong.append(
            "compressed_attention: all layers slide, and sliding_window is None"
        )
    if config.num_key_value_heads != 1:
        wrong.append(
            f"compressed_attention: num_key_value_heads {config.num_key_value_heads} "
            "is 1, of keys that are also the values"
        )
    if config.num_attention_heads % sizes.o_groups:
        wrong.append(
            f"num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"compressed_attention.o_groups {sizes.o_groups}"
        )
    return wrong + _inconsistent_ropes(config, sizes)


def _inconsistent_ropes(
    config: DecoderFields, sizes: CompressedAttentionConfig
) -> list[str]:
    if config.rope is None:
        return ["compressed_attention: its heads are rotated, and rope is None"]
    wrong = []
    ropes = {"rope": config.rope, "sliding_rope": config.sliding_rope or config.rope}
    for name, rope in ropes.items():
        if not rope.interleaved or rope.clockwise:
            wrong.append(
                f"compressed_attention: {name} turns two adjacent dims, interleaved "
                "and not clockwise"
            )
        if rope.rope_type in ("dynamic", "longrope", "proportional"):
            wrong.append(
                f"compressed_attention: {name}.rope_type {rope.rope_type!r} depends "
                "on the text or the width of a head"
            )
    parts = {name: rope.partial_rotary_factor for name, rope in ropes.items()}
    if len(set(parts.values())) > 1:
        wrong.append(f"compressed_attention: {parts} rotate the same dims of a head")
    if sizes.index_head_dim < config.rope_dim:
        wrong.append(
            f"compressed_attention.index_head_dim {sizes.index_head_dim} is below the "
            f"{config.rope_dim} rotated dims"
        )
    return wrong


def inconsistent_connections(config: DecoderFields) -> list[str]:
    """Returns what contradicts hyper-connections; empty if nothing.

    Args:
      config: Config, with fields of their types and positive sizes.
    """
    if config.hyper_connections is None:
        return []
    wrong = [
        f"hyper_connections: not beside {name}"
        for name in _NOT_BESIDE_STREAMS
        if getattr(config, name)
    ]
    if config.norm_placement != "pre":
        wrong.append("hyper_connections: norm_placement is 'pre'")
    if config.residual_multiplier != 1:
        wrong.append("hyper_connections: residual_multiplier is 1")
    if "none" in (config.layer_types or ()):
        wrong.append("hyper_connections: each layer has a mixer")
    return wrong


def inconsistent_hashes(config: DecoderFields) -> list[str]:
    """Returns what contradicts experts that follow from the id of a token.

    Args:
      config: Config, with fields of their types and positive sizes.
    """
    if not config.hash_layers:
        return []
    if config.moe is None:
        return ["hash_layers are set, but there is no moe"]
    hashed, wrong = config.hash_layers, []
    dense = set(config.dense_layers) | set(config.mixer_only_layers)
    if without := sorted(set(hashed) & dense):
        wrong.append(f"hash_layers {without} have no experts")
    if sorted(set(hashed)) != list(hashed):
        wrong.append(f"hash_layers {list(hashed)}: each layer once, in order")
    return wrong
