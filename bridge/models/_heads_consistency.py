"""Checks of fields that differential attention and biased keys exclude."""

from bridge.models._decoder_fields import DecoderFields

_NOT_BESIDE = (
    *("mla", "full_attention", "kv_sharing", "indexer", "block_indexer"),
    *("compressed_attention", "attention_gate", "value_head_dim", "alibi_bias_max"),
    *("attention_chunk_size", "dense_branch"),
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
    wrong = [
        f"{name}: not beside {other}"
        for name in given
        for other in _NOT_BESIDE
        if getattr(config, other)
    ]
    if config.differential_attention and config.num_key_value_heads % 2:
        wrong.append(
            f"differential_attention: num_key_value_heads "
            f"{config.num_key_value_heads} is odd, and heads subtract in pairs"
        )
    return wrong
