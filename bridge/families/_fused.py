"""q, k and v as one tensor."""

from bridge.families._blocks import Rules
from bridge.models import DecoderConfig
from bridge.rules._rules import Rule

_LEAVES = tuple(f"self_attn.{name}_proj" for name in "qkv")
_ROWS = "(kv_heads queries_of_key head_dim)", *("(kv_heads head_dim)",) * 2
_HEADS = "(kv_heads queries_of_key) head_dim", *("kv_heads head_dim",) * 2


def fused_qkv(config: DecoderConfig, source: str) -> Rules:
    """For each head of keys the rows of its queries, then of k, then of v.

    With one head of keys for all, that is q, k and v in turn.

    Args:
      config: The model.
      source: Name of the projection in the file.
    """
    pairs = tuple(zip(_ROWS, _HEADS, strict=True))
    rules = (
        Rule(
            f"{source}.weight",
            tuple(f"{leaf}.kernel" for leaf in _LEAVES),
            tuple(f"{rows} embed -> embed {heads}" for rows, heads in pairs),
            repeat="kv_heads",
        ),
    )
    if config.attention_bias:
        rules += (
            Rule(
                f"{source}.bias",
                tuple(f"{leaf}.bias" for leaf in _LEAVES),
                tuple(f"{rows} -> {heads}" for rows, heads in pairs),
                repeat="kv_heads",
            ),
        )
    return rules


def qkv_in_turn(config: DecoderConfig, source: str) -> Rules:
    """The rows of all queries, then those of k, then those of v.

    Args:
      config: The model.
      source: Name of the projection in the file.
    """
    rows = ("(heads head_dim)", *("(kv_heads head_dim)",) * 2)
    heads = ("heads head_dim", *("kv_heads head_dim",) * 2)
    pairs = tuple(zip(rows, heads, strict=True))
    rules = (
        Rule(
            f"{source}.weight",
            tuple(f"{leaf}.kernel" for leaf in _LEAVES),
            tuple(f"{rows} embed -> embed {heads}" for rows, heads in pairs),
        ),
    )
    if config.attention_bias:
        rules += (
            Rule(
                f"{source}.bias",
                tuple(f"{leaf}.bias" for leaf in _LEAVES),
                tuple(f"{rows} -> {heads}" for rows, heads in pairs),
            ),
        )
    return rules
