"""Which dim of each of the decoder's matrices tensor parallelism splits."""

import jax
from flax import nnx

from bridge._tree import named_leaves
from bridge.models._checks import raise_if
from bridge.models._config import DecoderConfig
from bridge.models._decoder import Decoder

# Ends of paths -> the dim, counted from the back, where a stack of layers adds none.
# By columns: vocabulary, heads, width of MLPs and experts.
_COLUMNS = {
    "embed_tokens.embedding": -2,
    "lm_head.kernel": -1,
    **{f"self_attn.{name}_proj.kernel": -2 for name in ("q", "k", "v", "q_b", "kv_b")},
    **{f"self_attn.{name}_proj.bias": -2 for name in "qkv"},
    "gate_proj.kernel": -1,
    "up_proj.kernel": -1,
    "gate_proj.bias": -1,
    "up_proj.bias": -1,
    "experts.gate_up_proj": -1,
    "experts.gate_up_bias": -1,
}
# By rows, of which each rank has a term of a sum.
_ROWS = {
    "self_attn.o_proj.kernel": -3,
    "down_proj.kernel": -2,
    "experts.down_proj": -2,
}
# A head each: norms that scale every head by itself, and sinks.
_BY_HEAD = {"self_attn.q_norm.scale": -2, "self_attn.k_norm.scale": -2}
_KV = ("self_attn.k_", "self_attn.v_")
_VOCABULARY = ("embed_tokens.", "lm_head.")


def tensor_parallel_rules(config: DecoderConfig, ranks: int) -> dict[str, int]:
    """Returns what `FSDPConfig(tensor_parallel=...)` of a `Decoder` says.

    Columns of the projections into heads and MLPs are split, rows of those back, and
    the vocabulary: Megatron's pairs. Of latent attention the unfolding projections are,
    and the narrow ones are not.

    Left whole on each rank, as a plan then shows: norms of the residual stream, routers
    and learned positions; keys and values, where the ranks do not divide their heads;
    and embedding and head, where they do not divide the vocabulary.

    Args:
      config: The model.
      ranks: Devices on the mesh axis `tp`.

    Returns:
      Path of a parameter -> its dim, counted from the back.

    Raises:
      ValueError: If the ranks do not divide the query heads, or the width of an MLP or
        of experts; all offenders in one message.
    """
    raise_if(f"Tensor parallelism over {ranks} ranks", _indivisible(config, ranks))
    whole = ()
    if config.num_key_value_heads % ranks:
        whole += _KV
    if config.vocab_size % ranks:
        whole += _VOCABULARY
    split = _COLUMNS | _ROWS | ({} if config.qk_norm == "head" else _BY_HEAD)
    return {
        path: dim
        for path in _paths(config)
        for end, dim in split.items()
        if f".{path}".endswith(f".{end}") and not end.startswith(whole)
    }


def _indivisible(config: DecoderConfig, ranks: int) -> list[str]:
    sizes = {"num_attention_heads": config.num_attention_heads}
    runs = config.layer_runs
    if not all(run.sparse for run in runs):
        sizes["intermediate_size"] = config.intermediate_size
    if (moe := config.moe) is not None:
        sizes["moe.intermediate_size"] = moe.intermediate_size
        sizes["moe.shared_intermediate_size"] = moe.shared_intermediate_size or 0
    return [
        f"{name} {size} is not a multiple of {ranks}: use fewer ranks"
        for name, size in sizes.items()
        if size % ranks
    ]


def _paths(config: DecoderConfig) -> list[str]:
    """Paths of a decoder's parameters, none of which is made."""
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(jax.random.key(0))))
    return list(named_leaves(nnx.state(model, nnx.Param)))
