"""Tensor-parallel rules of the decoder: the split dim of each of its matrices."""

import jax
from flax import nnx

from bridge._tree import named_leaves
from bridge.models._checks import raise_if
from bridge.models._config import DecoderConfig
from bridge.models._decoder import Decoder

# Path suffix -> split dim. Dims are negative, as stacked layers add a leading dim.
# Split by columns: vocabulary, heads, width of MLPs and experts.
_COLUMNS = {
    "embed_tokens.embedding": -2,
    "lm_head.kernel": -1,
    "lm_head.bias": -1,
    **{f"self_attn.{name}_proj.kernel": -2 for name in ("q", "k", "v", "q_b", "kv_b")},
    **{f"self_attn.{name}_proj.bias": -2 for name in "qkv"},
    "self_attn.o_a_proj.kernel": -4,
    "self_attn.q_experts": -2,
    "self_attn.q_gate.kernel": -2,
    "self_attn.q_gate_proj.kernel": -2,
    "self_attn.q_gate.bias": -2,
    "gate_proj.kernel": -1,
    "up_proj.kernel": -1,
    "gate_proj.bias": -1,
    "up_proj.bias": -1,
    "mlp.inner_norm.scale": -1,
    "self_attn.inner_norm.scale": -2,
    "experts.gate_up_proj": -1,
    "experts.up_proj": -1,
    "experts.gate_up_bias": -1,
}
# Heads of mixers other than attention.
_COLUMNS |= {
    **{f"delta_net.{name}_proj.kernel": -2 for name in "qkvz"},
    **{f"delta_net.{name}_proj.kernel": -1 for name in "ba"},
    **{f"delta_net.{name}_conv.kernel": -3 for name in "qkv"},
    "delta_net.a_log": -1,
    "delta_net.dt_bias": -1,
    **{f"lightning.{name}_proj.kernel": -2 for name in "qkvz"},
    "lightning.norm.scale": -2,
    **{f"mamba.{name}_proj.kernel": -2 for name in "zx"},
    **{f"mamba.{name}_proj.bias": -2 for name in "zx"},
    "mamba.x_conv.kernel": -3,
    "mamba.x_conv.bias": -2,
    **{f"mamba.{name}": -1 for name in ("a_log", "dt_bias", "skip")},
    **{f"mamba.dt_proj.{leaf}": -1 for leaf in ("kernel", "bias")},
    **{f"mamba1.{name}_proj.kernel": -1 for name in ("z", "x", "dt")},
    **{f"mamba1.{name}_proj.bias": -1 for name in ("z", "x", "dt")},
    **{f"mamba1.xz_proj.{leaf}": -2 for leaf in ("kernel", "bias")},
    "mamba1.x_conv.kernel": -2,
    "mamba1.x_conv.bias": -1,
    "mamba1.a_log": -2,
    "mamba1.skip": -1,
    **{f"rg_lru.{name}_proj.kernel": -2 for name in "zx"},
    **{f"rg_lru.{name}_proj.bias": -2 for name in "zx"},
    "rg_lru.x_conv.kernel": -3,
    "rg_lru.x_conv.bias": -2,
    **{f"rg_lru.{name}_gate.kernel": -3 for name in ("input", "decay")},
    **{f"rg_lru.{name}_gate.bias": -2 for name in ("input", "decay")},
    "rg_lru.decay_rate": -2,
    "short_conv.in_proj.kernel": -1,
    "short_conv.in_proj.bias": -1,
    "short_conv.conv.kernel": -2,
    "short_conv.conv.bias": -1,
    **{f"{name}_adapter.up.kernel": -2 for name in "qkv"},
    **{f"mlp_adapter.{name}.kernel": -1 for name in ("up", "gate")},
}
# Split by rows: each rank computes a partial sum.
_ROWS = {
    "self_attn.o_proj.kernel": -3,
    "self_attn.o_b_proj.kernel": -3,
    "self_attn.o_experts": -3,
    "delta_net.o_proj.kernel": -3,
    "lightning.o_proj.kernel": -3,
    "mamba.o_proj.kernel": -3,
    **{f"mamba1.{name}_proj.kernel": -2 for name in ("step", "b", "c", "o")},
    "rg_lru.o_proj.kernel": -3,
    "short_conv.out_proj.kernel": -2,
    "down_proj.kernel": -2,
    "experts.down_proj": -2,
}
# Projections that each head of Mamba 1 has of its own.
_BY_MAMBA1_HEAD = {
    **{f"mamba1.{name}_proj.kernel": -3 for name in ("step", "b", "c", "dt")},
    "mamba1.dt_proj.bias": -2,
}
# Split by head: norms with a scale per head.
_BY_HEAD = {"self_attn.q_norm.scale": -2, "self_attn.k_norm.scale": -2}
_KV = ("self_attn.k_", "self_attn.v_")
_VOCABULARY = ("embed_tokens.", "lm_head.")


def tensor_parallel_rules(config: DecoderConfig, ranks: int) -> dict[str, int]:
    """Returns the rules of a `Decoder` for `FSDPConfig(tensor_parallel=...)`.

    As in Megatron, projections to heads and into MLPs are split by columns, those back
    by rows, and embedding and head along the vocabulary. In latent attention the
    projections to heads are split, those to latent vectors are not.

    Replicated on each rank, as a plan shows: norms of the residual stream, routers,
    attention sinks, learned positions, biases of projections split by rows, gates of
    norms, projections of several streams, what layers project behind shared blocks, and
    in Mamba layers the norms and what groups of heads share; keys and values, if their
    heads are not divisible by `ranks`; embedding and head, if the vocabulary is not, or
    the rows of `unscored_tokens` behind it.

    Args:
      config: Config of the decoder.
      ranks: Number of devices on the mesh axis `tp`.

    Returns:
      Split dim, negative, by path of the parameter.

    Raises:
      ValueError: If the query heads or their groups, the heads of a delta net or of
        Mamba, the channels of Mamba 1 or of a short convolution, or the width of an
        MLP or of experts are not divisible by `ranks`. All are listed.

    Examples:
      >>> rules = bridge.models.tensor_parallel_rules(config, ranks=2)
      >>> rules["layers.mlp.up_proj.kernel"], rules["layers.mlp.down_proj.kernel"]
      (-1, -2)
    """
    raise_if(f"Tensor parallelism over {ranks} ranks", _indivisible(config, ranks))
    whole = ()
    full = config.full_attention
    counts = [config.num_key_value_heads, full.num_key_value_heads if full else 0]
    if any(count % ranks for count in counts):
        whole += _KV
    added = config.per_layer_input
    rows = [config.vocab_size, added.vocab_size if added else 0, config.unscored_tokens]
    if any(count % ranks for count in rows):
        whole += _VOCABULARY
    if config.delta_net is not None and config.delta_net.decay_by_dim:
        by_dim = {"delta_net.a_proj.kernel": -2, "delta_net.dt_bias": -2}
    else:
        by_dim = {}
    if config.mamba1 is not None and config.mamba1.num_heads is not None:
        by_dim |= _BY_MAMBA1_HEAD
    split = _COLUMNS | _ROWS | by_dim | ({} if config.qk_norm == "head" else _BY_HEAD)
    return {
        path: dim
        for path in _paths(config)
        for end, dim in split.items()
        if f".{path}".endswith(f".{end}") and not end.startswith(whole)
    }


def _indivisible(config: DecoderConfig, ranks: int) -> list[str]:
    mixers = {kind.mixer for kind in config.layer_kinds}
    sizes = {}
    attends = any(kind.attends for kind in config.layer_kinds)
    shared = config.shared_blocks is not None
    if "lightning" in mixers or attends or shared:
        sizes["num_attention_heads"] = config.num_attention_heads
        if (full := config.full_attention) and full.num_attention_heads:
            sizes["full_attention.num_attention_heads"] = full.num_attention_heads
    if config.attention_experts is not None:
        sizes["num_key_value_heads"] = config.num_key_value_heads
    if (compressed := config.compressed_attention) is not None:
        sizes["compressed_attention.o_groups"] = compressed.o_groups
    if "delta_net" in mixers and (delta := config.delta_net) is not None:
        sizes["delta_net.num_key_heads"] = delta.num_key_heads
        sizes["delta_net.num_value_heads"] = delta.num_value_heads
    if mixers & {"mamba", "attention_mamba"} and (mamba := config.mamba) is not None:
        sizes["mamba.num_heads"] = mamba.num_heads
    if "mamba1" in mixers and (channels := config.mamba1) is not None:
        sizes["mamba1.num_channels"] = channels.num_channels
        sizes["mamba1.num_heads"] = channels.num_heads or 0
    if "rg_lru" in mixers and (units := config.rg_lru) is not None:
        sizes["rg_lru.num_heads"] = units.num_heads
    if "short_conv" in mixers:
        sizes["hidden_size"] = config.hidden_size
    dense = any(kind.channels == "dense" for kind in config.layer_kinds)
    if dense or config.dense_branch or shared:
        sizes["intermediate_size"] = config.intermediate_size
        sizes |= {f"mlp_sizes of layer {i}": size for i, size in config.mlp_sizes}
        if (sharing := config.kv_sharing) is not None:
            sizes["kv_sharing.intermediate_size"] = sharing.intermediate_size
    if (moe := config.moe) is not None:
        sizes["moe.intermediate_size"] = moe.intermediate_size
        sizes["moe.shared_intermediate_size"] = moe.shared_intermediate_size or 0
    return [
        f"{name} {size} is not a multiple of {ranks}: use fewer ranks"
        for name, size in sizes.items()
        if size % ranks
    ]


def _paths(config: DecoderConfig) -> list[str]:
    """Returns the paths of a decoder's parameters, without allocating them."""
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(jax.random.key(0))))
    return list(named_leaves(nnx.state(model, nnx.Param)))
