"""Checks of fields that some kinds of attention, and norms inside it, exclude."""

from bridge.models._decoder_fields import DecoderFields

_NOT_BESIDE = (
    *("mla", "full_attention", "kv_sharing", "indexer", "block_indexer"),
    *("compressed_attention", "attention_gate", "value_head_dim", "alibi_bias_max"),
    *("attention_chunk_size", "dense_branch"),
)

_NOT_BESIDE_EXPERTS = (
    *_NOT_BESIDE,
    *("differential_attention", "dynamic_mask_size", "inner_norms", "attention_sinks"),
    *("attention_bias", "qk_norm", "value_norm", "clip_qkv", "query_scale"),
    *("multipliers", "shared_blocks"),
)

_NOT_BESIDE_INNER_NORMS = (
    *("differential_attention", "dynamic_mask_size", "compressed_attention", "moe"),
    *("kv_sharing", "indexer", "mla", "dense_branch"),
)


def inconsistent_heads(config: DecoderFields) -> list[str]:
    """Returns what is wrong with fields beside differential attention or biased keys.

    Args:
      config: Config, with fields of their types and positive sizes.
    """
    names = ("differential_attention", "dynamic_mask_size")
    given = [name for name in names if getattr(config, name)]
    if len(given) > 1:
        return [f"{' and '.join(given)}: one of both"]
    wrong = (
        _inconsistent_inner_norms(config)
        + _inconsistent_gates(config)
        + _inconsistent_experts(config)
        + [
            f"{name}: not beside {other}"
            for name in given
            for other in _NOT_BESIDE
            if getattr(config, other)
        ]
    )
    if config.differential_attention and config.num_key_value_heads % 2:
        wrong.append(
            f"differential_attention: num_key_value_heads "
            f"{config.num_key_value_heads} is odd, and heads subtract in pairs"
        )
    return wrong


def _inconsistent_gates(config: DecoderFields) -> list[str]:
    """Returns what is wrong with gates of norms, and of queries from one latent."""
    wrong, rank = [], config.norm_gate_rank
    if rank is not None and (config.norm_placement != "pre" or not config.norm_scale):
        wrong.append("norm_gate_rank: norm_placement is 'pre', of norms with a scale")
    if rank is not None and (config.norm_bias or config.residual_in_fp32):
        wrong.append("norm_gate_rank: neither norm_bias nor residual_in_fp32 is set")
    parts = ("dense_branch", "shared_blocks", "hyper_connections")
    if rank is not None and (beside := [n for n in parts if getattr(config, n)]):
        wrong.append(f"norm_gate_rank: beside {', '.join(beside)} norms have no gates")
    if config.mla and config.mla.gated_queries and config.attention_gate:
        wrong.append("mla.gated_queries: attention_gate is another gate")
    return wrong


def _inconsistent_experts(config: DecoderFields) -> list[str]:
    """Returns what is wrong with fields beside experts of attention."""
    if (experts := config.attention_experts) is None:
        return []
    wrong = [
        f"attention_experts: not beside {name}"
        for name in _NOT_BESIDE_EXPERTS
        if getattr(config, name)
    ]
    chosen, kv_heads = experts.num_experts_per_tok, config.num_key_value_heads
    if config.num_attention_heads != chosen * kv_heads:
        wrong.append(
            f"num_attention_heads {config.num_attention_heads} is not {chosen} "
            f"attention_experts.num_experts_per_tok of num_key_value_heads {kv_heads}"
        )
    return wrong


def _inconsistent_inner_norms(config: DecoderFields) -> list[str]:
    if not config.inner_norms:
        return []
    wrong = [
        f"inner_norms: not beside {name}"
        for name in _NOT_BESIDE_INNER_NORMS
        if getattr(config, name)
    ]
    types = set(config.layer_types or ()) - {"full_attention", "sliding_attention"}
    return wrong + [f"inner_norms: not beside {name}" for name in sorted(types)]
