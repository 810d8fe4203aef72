"""Checks of fields that layers with a shared block exclude."""

from bridge.models._decoder_fields import DecoderFields

_NOT_BESIDE = (
    *("mla", "full_attention", "kv_sharing", "indexer", "block_indexer"),
    *("compressed_attention", "differential_attention", "dynamic_mask_size"),
    *("attention_gate", "alibi_bias_max", "attention_chunk_size", "query_scale"),
    *("no_rope_layers", "qk_norm", "inner_norms", "multipliers", "norm_bias"),
    *("altup", "hyper_connections", "laurel_rank", "dense_branch", "learned_residual"),
    *("per_layer_input", "layer_scale", "unnormed_mixer_layers", "moe"),
)


def inconsistent_shared_blocks(config: DecoderFields) -> list[str]:
    """Returns what is wrong with fields beside shared blocks.

    Args:
      config: Config, with fields of their types and positive sizes.
    """
    if (blocks := config.shared_blocks) is None:
        return []
    wrong = [
        f"shared_blocks: not beside {name}"
        for name in _NOT_BESIDE
        if getattr(config, name)
    ]
    placement = config.recurrent_norm_placement or config.norm_placement
    if placement != "pre" or config.norm_placement != "pre":
        wrong.append(f"shared_blocks: norm_placement is 'pre', not {placement!r}")
    if not config.norm_scale:
        wrong.append("shared_blocks: their norms have a scale, and norm_scale is False")
    if not config.gated_mlp:
        wrong.append("shared_blocks: their MLPs have a gate, and gated_mlp is False")
    if (config.mamba is None) == (config.mamba1 is None):
        wrong.append(
            "shared_blocks: mixers behind them are Mamba, of one kind: set either "
            "mamba or mamba1"
        )
    types = config.layer_types or ("full_attention",) * config.num_hidden_layers
    known = {("mamba",), ("mamba1",)}
    others = [i for i in blocks.layers if types[i : i + 1] not in known or i < 0]
    if others:
        wrong.append(
            f"shared_blocks.layers {others}: none of the {config.num_hidden_layers} "
            "layers, or not of type 'mamba' or 'mamba1'"
        )
    return wrong
