"""q, k and v as one tensor."""

from bridge.families._blocks import Rules
from bridge.models import DecoderConfig
from bridge.rules._rules import Rule

_LEAVES = tuple(f"self_attn.{name}_proj" for name in "qkv")
# Rows of q, k and v in the file, and their dims in the model.
_KV = ("(kv_heads head_dim)", "kv_heads head_dim")
_BY_HEAD_OF_KEYS = (
    ("(kv_heads queries_of_key head_dim)", "(kv_heads queries_of_key) head_dim"),
    _KV,
    _KV,
)
_IN_TURN = (("(heads head_dim)", "heads head_dim"), _KV, _KV)


def fused_qkv(config: DecoderConfig, source: str) -> Rules:
    """For each head of keys the rows of its queries, then of k, then of v.

    With one head of keys for all, that is q, k and v in turn.

    Args:
      config: The model.
      source: Name of the projection in the file.
    """
    return _rules(config, source, _BY_HEAD_OF_KEYS, repeat="kv_heads")


def qkv_in_turn(config: DecoderConfig, source: str) -> Rules:
    """The rows of all queries, then those of k, then those of v.

    Args:
      config: The model.
      source: Name of the projection in the file.
    """
    return _rules(config, source, _IN_TURN)


def _rules(
    config: DecoderConfig,
    source: str,
    pairs: tuple[tuple[str, str], ...],
    repeat: str | None = None,
) -> Rules:
    kernels = tuple(f"{rows} embed -> embed {heads}" for rows, heads in pairs)
    biases = tuple(f"{rows} -> {heads}" for rows, heads in pairs)
    parts = [("weight", "kernel", kernels)]
    if config.attention_bias:
        parts.append(("bias", "bias", biases))
    return tuple(
        Rule(
            f"{source}.{name}",
            tuple(f"{projection}.{leaf}" for projection in _LEAVES),
            layouts,
            repeat=repeat,
        )
        for name, leaf, layouts in parts
    )
