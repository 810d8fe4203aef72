"""Sizes of the dims that rules name, by a model's config."""

from collections.abc import Sequence

from bridge.models import DecoderConfig, LayerKind

Sizes = dict[str, int | Sequence[int]]
"""Name of a dim -> its size; of one that counts the layers of a stack, the layers."""


def sizes_of(config: DecoderConfig) -> Sizes:
    """Returns the size of each dim that rules name, and each stack's layers.

    Args:
      config: Config of the decoder.
    """
    sizes: Sizes = {
        "one": 1,
        "two": 2,
        "three": 3,
        "four": 4,
        "vocab": config.vocab_size,
        "table": config.vocab_size + config.unscored_tokens,
        "positions": config.max_position_embeddings + config.position_offset,
        "embed": config.hidden_size,
        "embed_out": config.hidden_size,
        "mlp": config.intermediate_size,
        "heads": config.num_attention_heads,
        "head": config.num_attention_heads,
        "kv_head": config.num_key_value_heads,
        "kv_heads": config.num_key_value_heads,
        "heads_of_four": config.num_attention_heads // 4,
        "queries_of_key": config.num_attention_heads // config.num_key_value_heads,
        "head_dim": config.head_dim,
        "v_head_dim": config.v_head_dim,
    }
    sizes |= _attention_sizes(config) | _mixer_sizes(config)
    sizes |= _expert_sizes(config) | _stream_sizes(config)
    sizes |= _shared_block_sizes(config)
    sizes["norm_rank"] = config.norm_gate_rank or 0
    if config.hash_layers:
        sizes["hash_layer"] = config.hash_layers
    for number, stack in enumerate(config.layer_stacks):
        sizes[capture(number)] = stack.layers
        if stack.layers[0] > 0:
            sizes[before_capture(number)] = [layer - 1 for layer in stack.layers]
        if (width := stack.kind.mlp_size) is not None:
            sizes[mlp_dim(stack.kind)] = width
    return sizes


def mlp_dim(kind: LayerKind) -> str:
    """Name of the dim inside the dense MLPs of layers of a kind."""
    return "mlp" if kind.mlp_size is None else f"mlp_{kind.mlp_size}"


def capture(number: int) -> str:
    """Name of the dim that counts the layers of a stack."""
    return f"layer_{number}"


def before_capture(number: int) -> str:
    """Name of the dim that counts the layers before those of a stack, each one."""
    return f"before_{number}"


def use_capture(number: int) -> str:
    """Name of the dim that counts the uses of shared blocks in a stack."""
    return f"use_{number}"


def _shared_block_sizes(config: DecoderConfig) -> Sizes:
    """Returns the sizes of the dims of shared blocks, and each stack's uses of them."""
    if (blocks := config.shared_blocks) is None:
        return {}
    uses: Sizes = {
        use_capture(number): [blocks.layers.index(i) for i in stack.layers]
        for number, stack in enumerate(config.layer_stacks)
        if stack.kind.shared_block is not None
    }
    return uses | {
        "two_embeds": 2 * config.hidden_size,
        "attention_rank": blocks.attention_rank or 0,
        "mlp_rank": blocks.mlp_rank or 0,
    }


def _attention_sizes(config: DecoderConfig) -> Sizes:
    """Returns the sizes of the dims of other attention than that of heads alike."""
    sizes: Sizes = {}
    if (mla := config.mla) is not None:
        sizes |= {
            "q_rank": mla.q_lora_rank or 0,
            "two_q_ranks": 2 * (mla.q_lora_rank or 0),
            "query_and_gate": mla.qk_head_dim + mla.v_head_dim,
            "kv_rank": mla.kv_lora_rank,
            "kv_rank_and_rope": mla.kv_lora_rank + mla.qk_rope_head_dim,
            "nope_and_v": mla.qk_nope_head_dim + mla.v_head_dim,
        }
    if (compressed := config.compressed_attention) is not None:
        index_dim = compressed.index_head_dim
        sizes |= {
            "q_rank": compressed.q_lora_rank,
            "o_groups": compressed.o_groups,
            "o_rank": compressed.o_lora_rank,
            "group_heads": config.num_attention_heads // compressed.o_groups,
            "sparse_rate": compressed.sparse_rate,
            "heavy_rate": compressed.heavy_rate,
            "index_heads": compressed.index_num_heads,
            "index_dim": index_dim,
            "two_head_dims": 2 * config.head_dim,
            "two_index_dims": 2 * index_dim,
        }
    if (experts := config.attention_experts) is not None:
        sizes["attention_experts"] = experts.num_experts
    if (full := config.full_attention) is not None:
        sizes |= {
            "full_heads": full.num_attention_heads or config.num_attention_heads,
            "full_head_dim": full.head_dim,
            "full_v_head_dim": config.value_head_dim or full.head_dim,
            "full_kv_heads": full.num_key_value_heads,
        }
    if (sharing := config.kv_sharing) is not None:
        sizes["reusing_mlp"] = sharing.intermediate_size
    if (indexer := config.indexer) is not None:
        sizes |= {"index_heads": indexer.num_heads, "index_dim": indexer.head_dim}
    if (blocks := config.block_indexer) is not None:
        sizes |= {"index_heads": blocks.num_heads, "index_dim": blocks.head_dim}
    return sizes


def _expert_sizes(config: DecoderConfig) -> Sizes:
    """Returns the sizes of the dims of experts."""
    if (moe := config.moe) is None:
        return {}
    return {
        "expert": moe.num_experts,
        "experts": moe.num_experts,
        "choices": moe.num_choices,
        "expert_mlp": moe.intermediate_size,
        "expert_embed": moe.latent_size or config.hidden_size,
        "token_experts": moe.num_experts_per_tok,
        "shared_mlp": moe.shared_intermediate_size or 0,
    }


def _stream_sizes(config: DecoderConfig) -> Sizes:
    """Returns the sizes of the dims of what is beside or added to the stream."""
    sizes: Sizes = {}
    if (inputs := config.per_layer_input) is not None:
        sizes |= {
            "layer_input": inputs.size,
            "layer_inputs": inputs.size * config.num_hidden_layers,
            "layer_input_vocab": inputs.vocab_size,
        }
    if (altup := config.altup) is not None:
        count = altup.num_streams
        sizes |= dict.fromkeys(("streams", "streams_in", "streams_out"), count)
        sizes["other_stream"] = count - 1
    if (connections := config.hyper_connections) is not None:
        count = connections.num_streams
        sizes |= dict.fromkeys(("streams", "streams_out"), count)
        others = 0 if connections.independent else count
        sizes["stream_mixes"] = count * (2 + others)
    if config.laurel_rank is not None:
        sizes["laurel_rank"] = config.laurel_rank
    return sizes


def _mixer_sizes(config: DecoderConfig) -> Sizes:
    """Returns the sizes of the dims of mixers other than attention."""
    sizes: Sizes = {}
    if (conv := config.short_conv) is not None:
        sizes["conv_kernel"] = conv.kernel_size
    if (delta := config.delta_net) is not None:
        sizes |= {
            "conv_kernel": delta.kernel_size,
            "key_heads": delta.num_key_heads,
            "value_heads": delta.num_value_heads,
            "values_of_key": delta.num_value_heads // delta.num_key_heads,
            "key_dim": delta.key_head_dim,
            "value_dim": delta.value_head_dim,
            "decay_rank": delta.decay_rank or 0,
            "gate_rank": delta.gate_rank or 0,
            **dict.fromkeys(("one_a", "one_b", "one_c"), 1),
        }
    if (mamba := config.mamba) is not None:
        sizes |= {
            "conv_kernel": mamba.kernel_size,
            "mamba_heads": mamba.num_heads,
            "mamba_dim": mamba.head_dim,
            "mamba_groups": mamba.num_groups,
            "mamba_state": mamba.state_size,
            "group_width": mamba.num_heads // mamba.num_groups * mamba.head_dim,
        }
    if (mamba1 := config.mamba1) is not None:
        sizes |= {
            "conv_kernel": mamba1.kernel_size,
            "channels": mamba1.num_channels,
            "channel_heads": mamba1.num_heads or 1,
            "channel_dim": mamba1.num_channels // (mamba1.num_heads or 1),
            "channel_state": mamba1.state_size,
            "step_rank": mamba1.time_step_rank,
        }
    if (rg_lru := config.rg_lru) is not None:
        sizes |= {
            "conv_kernel": rg_lru.kernel_size,
            "lru_heads": rg_lru.num_heads,
            "lru_dim": rg_lru.head_dim,
            "lru_dim_out": rg_lru.head_dim,
        }
    return sizes
