"""Checks of a decoder's config: which of its fields contradict one another."""

from __future__ import annotations

from bridge.models._decoder_fields import DecoderFields
from bridge.models._entry_consistency import (
    inconsistent_connections,
    inconsistent_entries,
    inconsistent_hashes,
)
from bridge.models._heads_consistency import inconsistent_heads
from bridge.models._shared_blocks_consistency import inconsistent_shared_blocks

MAX_LAYERS = 1000
"""Upper bound on layers, against damaged configs or ones meant to exhaust memory."""

_PARTS = {
    "block_sparse_attention": "block_indexer",
    "short_conv": "short_conv",
    "delta_net": "delta_net",
    "lightning": "lightning",
    "mamba": "mamba",
    "mamba1": "mamba1",
    "rg_lru": "rg_lru",
    "attention_mamba": "mamba",
}
"""Fields with the sizes that layers of a type need."""


def inconsistencies(config: DecoderFields) -> list[str]:
    """Returns what is wrong with fields that are each valid alone; empty if nothing.

    Args:
      config: Config, with fields of their types and positive sizes.
    """
    if config.num_hidden_layers > MAX_LAYERS:  # before any list of so many
        return [
            f"num_hidden_layers {config.num_hidden_layers:,}: at most {MAX_LAYERS:,}"
        ]
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    wrong = []
    if heads % kv_heads:
        wrong.append(
            f"num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}: query heads share key heads in "
            "equal groups"
        )
    if config.rope_dim % 2:
        wrong.append(
            f"head_dim {config.head_dim}, of which {config.rope_dim} dims are rotated: "
            "an odd number, but rotary embedding rotates pairs"
        )
    for name in ("norm_eps", "initializer_range"):
        if getattr(config, name) < 0:
            wrong.append(f"{name} {getattr(config, name)} is negative")
    wrong += _inconsistent_features(config)
    wrong += _inconsistent_full_attention(config)
    wrong += _inconsistent_value_heads(config)
    if config.logits_scaling == 0:
        wrong.append("logits_scaling 0 divides the logits")
    if config.unscored_tokens < 0:
        wrong.append(f"unscored_tokens {config.unscored_tokens} is negative")
    if config.unscored_tokens and config.tie_word_embeddings:
        wrong.append("unscored_tokens: a tied embedding scores all its rows")
    if config.mla and (kv_heads != heads or config.head_dim != config.mla.qk_head_dim):
        wrong.append(
            f"mla: num_key_value_heads {kv_heads} and head_dim {config.head_dim} "
            f"must be {heads} and {config.mla.qk_head_dim}"
        )
    wrong += _inconsistent_indexers(config) + _inconsistent_blocks(config)
    wrong += _inconsistent_sharing(config) + _inconsistent_branch(config)
    wrong += _inconsistent_residuals(config) + inconsistent_heads(config)
    wrong += _inconsistent_streams(config) + inconsistent_entries(config)
    wrong += inconsistent_connections(config) + inconsistent_hashes(config)
    wrong += inconsistent_shared_blocks(config)
    return wrong + _inconsistent_layers(config)


def _inconsistent_indexers(config: DecoderFields) -> list[str]:
    indexer, shared = config.indexer, config.shared_indexer_layers
    if indexer is None:
        return ["shared_indexer_layers are set, but indexer is None"] * bool(shared)
    wrong = []
    if config.mla is None or config.mla.q_lora_rank is None:
        wrong.append("indexer: its queries are projected from mla.q_lora_rank")
    elif indexer.head_dim < config.mla.qk_rope_head_dim:
        wrong.append(
            f"indexer.head_dim {indexer.head_dim} is below the "
            f"{config.mla.qk_rope_head_dim} dims of mla.qk_rope_head_dim"
        )
    if set(config.layer_types or ()) - {"full_attention"} or config.sliding_window:
        wrong.append("indexer: all layers are of full attention")
    if outside := [i for i in shared if not 0 < i < config.num_hidden_layers]:
        wrong.append(
            f"shared_indexer_layers {outside}: behind the first layer, and of the "
            f"{config.num_hidden_layers} layers"
        )
    return wrong


def _inconsistent_blocks(config: DecoderFields) -> list[str]:
    if (indexer := config.block_indexer) is None:
        return []
    wrong, kv_heads = [], config.num_key_value_heads
    if config.mla is not None or config.indexer is not None:
        wrong.append("block_indexer: neither beside mla nor indexer")
    if kv_heads % indexer.num_heads:
        wrong.append(
            f"num_key_value_heads {kv_heads} is not a multiple of "
            f"block_indexer.num_heads {indexer.num_heads}, each of which selects for "
            "as many key heads"
        )
    if indexer.head_dim < config.rope_dim:
        wrong.append(
            f"block_indexer.head_dim {indexer.head_dim} is below the "
            f"{config.rope_dim} dims that rotate"
        )
    beside = ("alibi_bias_max", "kv_sharing", "full_attention")
    wrong += [
        f"block_indexer: not beside {name}" for name in beside if getattr(config, name)
    ]
    return wrong


def _inconsistent_sharing(config: DecoderFields) -> list[str]:
    if (sharing := config.kv_sharing) is None:
        return []
    first, wrong = config.num_hidden_layers - sharing.num_layers, []
    if first < 1:
        wrong.append(
            f"kv_sharing.num_layers {sharing.num_layers} leaves none of the "
            f"{config.num_hidden_layers} layers with keys and values"
        )
    types = config.layer_types or ()
    if orphans := sorted(set(types[first:]) - set(types[:first])):
        wrong.append(
            f"kv_sharing: {', '.join(orphans)} comes behind layer {first} alone, "
            "and no layer before has its keys and values"
        )
    if config.full_attention is None:
        wrong.append("kv_sharing: full_attention tells its types of layers apart")
    if config.moe is not None:
        wrong.append("kv_sharing: its layers are dense, and moe is set")
    beside = ("attention_gate", "clip_qkv", "qk_norm_after_rope", "multipliers")
    wrong += [
        f"kv_sharing: not beside {name}" for name in beside if getattr(config, name)
    ]
    return wrong


def _inconsistent_residuals(config: DecoderFields) -> list[str]:
    given, placement = [], config.norm_placement
    if config.recurrent_norm_placement and placement not in ("pre", "post", "both"):
        return [
            f"recurrent_norm_placement: norm_placement {placement!r} is 'pre', 'post' "
            "or 'both'"
        ]
    if config.norm_placement == "in_stream":
        given.append("norm_placement 'in_stream'")
    if config.learned_residual:
        given.append("learned_residual")
    if config.residual_factors is not None:
        given.append("residual_factors")
        if config.norm_placement.startswith("parallel"):
            given.append(f"norm_placement {config.norm_placement!r}")
            return [f"{given[-2]}: not beside {given[-1]}"]
    beside = ("altup", "hyper_connections", "laurel_rank", "dense_branch")
    wrong = [
        f"{each}: not beside {name}"
        for each in given
        for name in beside
        if getattr(config, name)
    ]
    if config.learned_residual and config.norm_placement.startswith("parallel"):
        wrong.append(
            f"learned_residual: not beside norm_placement {config.norm_placement!r}"
        )
    if config.residual_factors and config.residual_multiplier != 1:
        wrong.append("residual_factors and residual_multiplier: one of both")
    if config.lightning and config.residual_factors is None:
        wrong.append("lightning: residual_factors are those of the other layers")
    return wrong


_NOT_BESIDE_BRANCH = (
    *("dense_layers", "hash_layers", "mixer_only_layers", "mlp_sizes", "indexer"),
    *("block_indexer", "kv_sharing", "full_attention", "compressed_attention"),
    *("altup", "hyper_connections", "per_layer_input", "laurel_rank", "layer_scale"),
)


def _inconsistent_branch(config: DecoderFields) -> list[str]:
    if not config.dense_branch:
        return []
    wrong = [
        f"dense_branch: not beside {name}"
        for name in _NOT_BESIDE_BRANCH
        if getattr(config, name)
    ]
    if config.moe is None:
        wrong.append("dense_branch: experts run beside it, and moe is None")
    elif config.moe.own_norms:
        wrong.append("dense_branch: not beside moe.own_norms")
    if config.norm_placement != "pre":
        wrong.append(f"dense_branch: norm_placement {config.norm_placement!r} is 'pre'")
    if config.residual_multiplier != 1:
        wrong.append(
            f"dense_branch: residual_multiplier {config.residual_multiplier} is 1"
        )
    others = set(config.layer_types or ()) - {"full_attention", "sliding_attention"}
    if others:
        wrong.append(f"dense_branch: not beside {', '.join(sorted(others))}")
    return wrong


def _inconsistent_streams(config: DecoderFields) -> list[str]:
    wrong = []
    if config.altup is not None and config.per_layer_input is None:
        wrong.append("altup: per_layer_input is what a layer adds to its streams")
    if config.laurel_rank is not None and config.norm_placement != "both":
        wrong.append("laurel_rank: norm_placement is 'both'")
    kinds = set(config.layer_types or ("full_attention",))
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    if others and (config.altup or config.laurel_rank):
        wrong.append(f"altup and laurel_rank: not beside {', '.join(others)}")
    if bool(config.cut_gate_layers) != (config.gate_sparsity is not None):
        wrong.append("gate_sparsity and cut_gate_layers: both or neither")
    if config.gate_sparsity is not None and not 0 < config.gate_sparsity < 1:
        wrong.append(f"gate_sparsity {config.gate_sparsity}: between 0 and 1")
    if config.cut_gate_layers and (config.moe or not config.gated_mlp):
        wrong.append("cut_gate_layers: their MLPs are dense and gated")
    return wrong


def _inconsistent_features(config: DecoderFields) -> list[str]:
    wrong = []
    if config.swiglu_limit is None and config.swiglu_alpha is not None:
        wrong.append("swiglu_alpha without swiglu_limit: its inputs are bounded")
    if config.swiglu_limit is not None and not config.gated_mlp:
        wrong.append("swiglu_limit: gated_mlp is not set")
    if config.moe and config.hidden_act == "xielu":
        wrong.append("hidden_act 'xielu': experts have no learned activation")
    if config.rg_lru and config.hidden_act == "xielu":
        wrong.append("hidden_act 'xielu': rg_lru has no learned activation")
    if config.moe and config.moe.expert_bias and not config.gated_mlp:
        wrong.append("moe.expert_bias: only gated experts have biases")
    scaled = config.norm_bias or config.qk_norm not in (None, "l2") or config.mla
    if not config.norm_scale and scaled:
        wrong.append("norm_scale False: neither norm_bias, qk_norm nor mla is set")
    if config.attention_gate_activation != "sigmoid" and not config.attention_gate:
        wrong.append("attention_gate_activation: attention_gate is not set")
    if config.attention_gate_per_head and not config.attention_gate:
        wrong.append("attention_gate_per_head: attention_gate is not set")
    if config.rope is not None and config.learned_positions:
        wrong.append("learned_positions: not beside a rope")
    if config.sinusoidal_positions:
        if config.rope or config.learned_positions:
            wrong.append("sinusoidal_positions: neither beside a rope nor learned ones")
        if config.hidden_size < 4:
            wrong.append(f"sinusoidal_positions: hidden_size {config.hidden_size} < 4")
    if config.alibi_bias_max is not None and (config.rope or config.mla):
        wrong.append("alibi_bias_max: neither beside a rope nor latent attention")
    if config.qk_norm_after_rope and config.qk_norm is None:
        wrong.append("qk_norm_after_rope is set, but qk_norm is None")
    if config.qk_norm_bias and config.qk_norm in (None, "l2"):
        wrong.append(f"qk_norm_bias is set, but qk_norm is {config.qk_norm!r}")
    if config.qk_norm_bias and not config.norm.startswith("layer"):
        wrong.append(f"qk_norm_bias: norm {config.norm!r} has no bias")
    if config.value_norm and config.mla:
        wrong.append("value_norm: latent attention has none")
    if config.position_offset < 0 or (config.position_offset and config.rope):
        wrong.append(
            f"position_offset {config.position_offset} must be at least 0, and 0 "
            "with a rope"
        )
    return wrong


def _inconsistent_full_attention(config: DecoderFields) -> list[str]:
    if (full := config.full_attention) is None:
        return []
    wrong = []
    heads = full.num_attention_heads or config.num_attention_heads
    if heads % full.num_key_value_heads:
        wrong.append(
            f"num_attention_heads {heads} is not a multiple "
            f"of full_attention.num_key_value_heads {full.num_key_value_heads}"
        )
    if config.mla or config.rope is None or config.no_rope_layers:
        wrong.append("full_attention: neither beside mla nor without a rope")
    if set(config.layer_types or ()) - {"sliding_attention", "full_attention"}:
        wrong.append("full_attention: layer_types are sliding or full")
    if config.query_scale or config.attention_chunk_size or config.qk_norm == "l2":
        wrong.append("full_attention: layers differ in windows and ropes alone")
    return wrong


def _inconsistent_value_heads(config: DecoderFields) -> list[str]:
    if config.value_head_dim is None:
        return []
    wrong = [
        f"value_head_dim: not beside {name}"
        for name in ("mla", "compressed_attention", "value_norm")
        if getattr(config, name)
    ]
    if config.full_attention and config.full_attention.shared_key_value:
        wrong.append("value_head_dim: full layers have values of their own")
    return wrong


def _inconsistent_layers(config: DecoderFields) -> list[str]:
    layers, types = config.num_hidden_layers, config.layer_types
    wrong = []
    if types is not None and len(types) != layers:
        wrong.append(f"layer_types has {len(types)} entries for {layers} layers")
    if "sliding_attention" in (types or ()) and config.sliding_window is None:
        wrong.append("layer_types slide, but sliding_window is None")
    wrong += [
        f"layer_types have {name}, but {part} is None"
        for name, part in _PARTS.items()
        if name in (types or ()) and getattr(config, part) is None
    ]
    if "chunked_attention" in (types or ()) and config.attention_chunk_size is None:
        wrong.append("layer_types are chunked, but attention_chunk_size is None")
    if config.dense_layers and config.moe is None:
        wrong.append("dense_layers are set, but there is no moe")
    listed = ("dense_layers", "hash_layers", "no_rope_layers", "mixer_only_layers")
    for name in (*listed, "cut_gate_layers", "unnormed_mixer_layers"):
        if outside := [i for i in getattr(config, name) if not 0 <= i < layers]:
            wrong.append(f"{name} {outside} are none of the {layers} layers")
    wrong += _inconsistent_widths(config)
    if types is not None and not wrong:
        empty = [i for i in config.mixer_only_layers if types[i] == "none"]
        wrong += [f"layer {i} has neither mixer nor MLP" for i in empty]
    if "none" in (types or ()) or config.mixer_only_layers:
        if config.norm_placement != "pre":
            wrong.append("layers without mixer or MLP: norm_placement is 'pre'")
    placements = ("pre", "in_stream")
    if config.unnormed_mixer_layers and config.norm_placement not in placements:
        wrong.append("unnormed_mixer_layers: norm_placement is 'pre' or 'in_stream'")
    if config.rope is None and (config.sliding_rope or config.no_rope_layers):
        wrong.append("sliding_rope and no_rope_layers need a rope")
    return wrong


def _inconsistent_widths(config: DecoderFields) -> list[str]:
    given = [layer for layer, _ in config.mlp_sizes]
    dense = set(range(config.num_hidden_layers) if config.moe is None else ())
    dense = (dense | set(config.dense_layers)) - set(config.mixer_only_layers)
    wrong = [
        f"mlp_sizes give layer {layer} a width of {width}: one of at least 1 that is "
        f"not intermediate_size {config.intermediate_size}, once, for layers with a "
        "dense MLP"
        for layer, width in config.mlp_sizes
        if layer not in dense
        or given.count(layer) > 1
        or width < 1
        or width == config.intermediate_size
    ]
    if given and config.kv_sharing is not None:
        wrong.append("mlp_sizes: not beside kv_sharing, which has a width of its own")
    return wrong
