"""Weight rules between Megatron's tensors, by canonical name, and our decoder's leaves.

Megatron gives a part the same name in every family, so one table serves all families.
Two projections are fused: `linear_fc1` is gate followed by up; `linear_qkv` holds, for
each group, the queries that share a key, then the key, then the value. `linear_qkv` is
not a split along a complete dim, so its rules use the factored shape of `Regrouped`.

Source: Megatron-LM megatron/core/transformer/attention.py
::SelfAttention.get_query_key_value_tensors, megatron/core/transformer/mlp.py::MLP,
megatron/core/transformer/multi_latent_attention.py::MLASelfAttention,
megatron/core/ssm/mamba_mixer.py::MambaMixer
"""

from collections.abc import Mapping

from bridge.families._blocks import linear
from bridge.families._dim_sizes import sizes_of
from bridge.families._family import KeyMapping, Layers
from bridge.families._mamba import mamba
from bridge.megatron._names import EMBEDDING, HEAD
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._mapping import Mapping as WeightMapping
from bridge.rules._rules import Rule, RuleSizes

Rules = tuple[Rule, ...]

_QKV = "self_attention.linear_qkv"
_PARTS = tuple(f"self_attn.{name}_proj" for name in "qkv")


def weight_mapping(config: DecoderConfig) -> WeightMapping:
    """Returns `weight_rules` with the sizes of their named dims.

    Args:
      config: Model config that `to_transformer_config` accepts.
    """
    # Ignore multi-token-prediction layers, as transformers does.
    further = dict(config.passthrough).get("num_nextn_predict_layers")
    return WeightMapping(
        weight_rules(config), _sizes(config), ("mtp.**",) if further else ()
    )


def weight_rules(config: DecoderConfig) -> Rules:
    """Returns the rules between Megatron's tensors and our decoder's leaves.

    Args:
      config: Model config that `to_transformer_config` accepts.

    Returns:
      Rules from canonical names to leaves; `linear_qkv` has the factored shape of
      `grouped_shapes`.
    """
    return KeyMapping(_outer, Layers("decoder.layers.{layer}.", _layer)).rules(config)


def grouped_shapes(config: DecoderConfig) -> Mapping[str, tuple[int, ...]]:
    """Returns the factored shape that the rules use for each `linear_qkv`.

    Args:
      config: Model config that `to_transformer_config` accepts.

    Returns:
      Shapes `(groups, parts, head_dim, embed)` by canonical name, where the parts of a
      group are its queries, its key and its value; a bias has no `embed` dim. Empty for
      latent attention.
    """
    if config.mla is not None:
        return {}
    groups = config.num_key_value_heads
    parts = config.num_attention_heads // groups + 2
    rows = (groups, parts, config.head_dim)
    shapes = {"weight": (*rows, config.hidden_size)}
    if config.attention_bias:
        shapes |= {"bias": rows}
    return {
        f"decoder.layers.{layer}.{_QKV}.{name}": shape
        for layer, kind in enumerate(config.layer_kinds)
        if kind.mixer == "attention"
        for name, shape in shapes.items()
    }


def _sizes(config: DecoderConfig) -> RuleSizes:
    shared = config.num_attention_heads // config.num_key_value_heads
    return {**sizes_of(config), "queries_of_key": shared}


def _outer(config: DecoderConfig) -> Rules:
    table = "{0} embed -> {0} embed"
    rules = (Rule(EMBEDDING, "embed_tokens.embedding", table.format("vocab")),)
    if config.learned_positions:
        rules += (
            Rule(
                "embedding.position_embeddings.weight",
                "embed_positions.embedding",
                table.format("positions"),
            ),
        )
    rules += _norm(config, "decoder.final_layernorm.", "norm")
    if not config.tie_word_embeddings:
        rules += (Rule(HEAD, "lm_head.kernel", "vocab embed -> embed vocab"),)
    return rules


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    """Both sub-blocks of a GPT's layer, or the one that a hybrid model's layer has."""
    return _mixer(config, kind) + _channels(config, kind)


def _mixer(config: DecoderConfig, kind: LayerKind) -> Rules:
    if kind.mixer is None:
        return ()
    if kind.mixer == "mamba":
        before = "mixer.in_proj.layer_norm_"
        return _norm(config, before, "input_layernorm") + mamba(config, "mixer.")
    latent = config.mla is not None
    before = "input_layernorm." if latent else f"{_QKV}.layer_norm_"
    return (
        *_norm(config, before, "input_layernorm"),
        *(_latent_attention if latent else _attention)(config),
        *_out(config),
    )


def _channels(config: DecoderConfig, kind: LayerKind) -> Rules:
    if kind.channels is None:
        return ()
    sparse = kind.channels == "sparse"
    within = "pre_mlp_layernorm." if sparse else "mlp.linear_fc1.layer_norm_"
    return (
        *_norm(config, within, "pre_feedforward_layernorm"),
        *(_sparse if sparse else _dense)(config),
    )


def _norm(config: DecoderConfig, source: str, destination: str) -> Rules:
    rules = (Rule(f"{source}weight", f"{destination}.scale", "embed -> embed"),)
    if config.norm_bias:
        rules += (Rule(f"{source}bias", f"{destination}.bias", "embed -> embed"),)
    return rules


def _attention(config: DecoderConfig) -> Rules:
    factors = ("queries_of_key", "one", "one")
    rows = [f"kv_heads {part} head_dim" for part in factors]
    heads = [f"(kv_heads {part}) head_dim" for part in factors]
    kernels = tuple(f"{r} embed -> embed {h}" for r, h in zip(rows, heads, strict=True))
    # Split along dim 1, the parts of a group: its queries, its key and its value.
    rules = (Rule(f"{_QKV}.weight", _leaves("kernel"), kernels, dim=1),)
    if config.attention_bias:
        biases = tuple(f"{r} -> {h}" for r, h in zip(rows, heads, strict=True))
        rules += (Rule(f"{_QKV}.bias", _leaves("bias"), biases, dim=1),)
    if config.qk_norm == "head":
        rules += tuple(
            Rule(
                f"self_attention.{name}_layernorm.weight",
                f"self_attn.{name}_norm.scale",
                "head_dim -> head_dim",
            )
            for name in ("q", "k")
        )
    if config.attention_sinks:
        offset = "self_attention.core_attention.softmax_offset"
        rules += (Rule(offset, "self_attn.sinks", "heads -> heads"),)
    return rules


def _leaves(name: str) -> tuple[str, ...]:
    return tuple(f"{part}.{name}" for part in _PARTS)


def _out(config: DecoderConfig) -> Rules:
    return linear(
        "self_attention.linear_proj",
        "self_attn.o_proj",
        "embed (heads v_head_dim) -> heads v_head_dim embed",
        "embed -> embed" if config.attention_out_bias else None,
    )


def _latent_attention(config: DecoderConfig) -> Rules:
    assert config.mla is not None
    at, to = "self_attention.", "self_attn."
    queries = "(heads head_dim) {0} -> {0} heads head_dim"
    wide = "kv_rank_and_rope"
    if config.mla.q_lora_rank is None:
        rules = linear(at + "linear_q_proj", to + "q_proj", queries.format("embed"))
    else:
        down = "q_rank embed -> embed q_rank"
        rules = (
            *linear(at + "linear_q_down_proj", to + "q_a_proj", down),
            _latent_norm("q"),
            *linear(at + "linear_q_up_proj", to + "q_b_proj", queries.format("q_rank")),
        )
    return (
        *rules,
        *linear(
            at + "linear_kv_down_proj",
            to + "kv_a_proj_with_mqa",
            f"{wide} embed -> embed {wide}",
        ),
        _latent_norm("kv"),
        *linear(
            at + "linear_kv_up_proj",
            to + "kv_b_proj",
            "(heads nope_and_v) kv_rank -> kv_rank heads nope_and_v",
        ),
    )


def _latent_norm(name: str) -> Rule:
    return Rule(
        f"self_attention.{name}_layernorm.weight",
        f"self_attn.{name}_a_layernorm.scale",
        f"{name}_rank -> {name}_rank",
    )


def _dense(config: DecoderConfig) -> Rules:
    return _mlp("mlp.", "mlp.", "mlp", gated=config.gated_mlp, biased=config.mlp_bias)


def _mlp(
    at: str, to: str, width: str, *, gated: bool = True, biased: bool = False
) -> Rules:
    names = ("gate_proj", "up_proj") if gated else ("up_proj",)
    rules = (
        Rule(
            f"{at}linear_fc1.weight",
            tuple(f"{to}{name}.kernel" for name in names),
            f"{width} embed -> embed {width}",
        ),
    )
    if biased:
        biases = tuple(f"{to}{name}.bias" for name in names)
        rules += (Rule(f"{at}linear_fc1.bias", biases, f"{width} -> {width}"),)
    down = f"embed {width} -> {width} embed"
    bias = "embed -> embed" if biased else None
    return rules + linear(f"{at}linear_fc2", f"{to}down_proj", down, bias)


def _sparse(config: DecoderConfig) -> Rules:
    moe = config.moe
    assert moe is not None
    gated = config.gated_mlp
    experts = _experts(biased=moe.expert_bias) if gated else _ungated_experts()
    rules = _router(config) + experts
    if moe.shared_intermediate_size is not None:
        shared = "mlp.shared_experts.", "mlp.shared_expert.", "shared_mlp"
        rules += _mlp(*shared, gated=gated)
    if moe.latent_size is not None:
        rules += _latent_experts()
    if moe.shared_gate:
        gate = "mlp.shared_experts.gate_weight"
        rules += (Rule(gate, "mlp.shared_gate.kernel", "one embed -> embed one"),)
    return rules


def _router(config: DecoderConfig) -> Rules:
    assert config.moe is not None
    each = "experts -> experts"
    rules = linear(
        "mlp.router",
        "mlp.router.gate",
        "experts embed -> embed experts",
        each if config.moe.router_bias else None,
    )
    if config.moe.correction_bias:
        rules += (Rule("mlp.router.expert_bias", "mlp.router.correction_bias", each),)
    return rules


def _latent_experts() -> Rules:
    """Projections to the vectors that experts see, and back."""
    return (
        *linear(
            "mlp.fc1_latent_proj",
            "mlp.latent_in",
            "expert_embed embed -> embed expert_embed",
        ),
        *linear(
            "mlp.fc2_latent_proj",
            "mlp.latent_out",
            "embed expert_embed -> expert_embed embed",
        ),
    )


def _ungated_experts() -> Rules:
    at, to = "mlp.experts.{expert}.", "mlp.experts."
    return (
        Rule(
            f"{at}linear_fc1.weight",
            f"{to}up_proj",
            "expert_mlp expert_embed -> expert_embed expert_mlp",
        ),
        Rule(
            f"{at}linear_fc2.weight",
            f"{to}down_proj",
            "expert_embed expert_mlp -> expert_mlp expert_embed",
        ),
    )


def _experts(*, biased: bool) -> Rules:
    at, to = "mlp.experts.{expert}.", "mlp.experts."
    inside = "(two expert_mlp)", "two expert_mlp"
    rules = (
        Rule(
            f"{at}linear_fc1.weight",
            f"{to}gate_up_proj",
            f"{inside[0]} embed -> embed {inside[1]}",
        ),
        Rule(
            f"{at}linear_fc2.weight",
            f"{to}down_proj",
            "embed expert_mlp -> expert_mlp embed",
        ),
    )
    if biased:
        rules += (
            Rule(
                f"{at}linear_fc1.bias",
                f"{to}gate_up_bias",
                f"{inside[0]} -> {inside[1]}",
            ),
            Rule(f"{at}linear_fc2.bias", f"{to}down_bias", "embed -> embed"),
        )
    return rules
