"""Checks of the fields beside differential attention."""

from bridge.models._decoder_fields import DecoderFields

_NOT_BESIDE = (
    *("mla", "full_attention", "kv_sharing", "indexer", "block_indexer"),
    *("compressed_attention", "attention_gate", "value_head_dim", "alibi_bias_max"),
    *("attention_chunk_size", "dense_branch"),
)


def inconsistent_differences(config: DecoderFields) -> list[str]:
    """Returns what is wrong with fields beside differential attention.

    Args:
      config: Config, with fields of their types and positive sizes.
    """
    if not config.differential_attention:
        return []
    wrong = [
        f"differential_attention: not beside {name}"
        for name in _NOT_BESIDE
        if getattr(config, name)
    ]
    if config.num_key_value_heads % 2:
        wrong.append(
            f"differential_attention: num_key_value_heads "
            f"{config.num_key_value_heads} is odd, and heads subtract in pairs"
        )
    return wrong
