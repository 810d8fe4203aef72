"""Rules between the tensors of DeepSeek-V4's files and the leaves of a decoder.

transformers has names in memory that are not those of the released files. What it
writes has the names of the releases in layers, and its own around them.
"""

from collections.abc import Callable, Mapping

from bridge.families._blocks import (
    FUSED_EXPERTS,
    Rules,
    experts,
    ignore_tied_head,
    linear,
    norm,
    outside,
    renamed,
)
from bridge.families._family import KeyMapping, Layers
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_ATTENTION = (
    Rule("self_attn.sinks", "self_attn.sinks", "heads -> heads"),
    *linear("self_attn.q_a_proj", "self_attn.q_a_proj", "q_rank embed -> embed q_rank"),
    norm("self_attn.q_a_norm", "self_attn.q_a_norm", "q_rank"),
    *linear(
        "self_attn.q_b_proj",
        "self_attn.q_b_proj",
        "(heads head_dim) q_rank -> q_rank heads head_dim",
    ),
    *linear(
        "self_attn.kv_proj", "self_attn.kv_proj", "head_dim embed -> embed head_dim"
    ),
    norm("self_attn.kv_norm", "self_attn.kv_norm", "head_dim"),
    *linear(
        "self_attn.o_a_proj",
        "self_attn.o_a_proj",
        "(o_groups o_rank) (group_heads head_dim) -> "
        "o_groups group_heads head_dim o_rank",
    ),
    *linear(
        "self_attn.o_b_proj",
        "self_attn.o_b_proj",
        "embed (o_groups o_rank) -> o_groups o_rank embed",
    ),
)


def _compressor(at: str, to: str, rate: str, width: str, inside: str) -> Rules:
    return (
        *linear(f"{at}.kv_proj", f"{to}.kv_proj", f"{inside} embed -> embed {inside}"),
        *linear(
            f"{at}.gate_proj", f"{to}.gate_proj", f"{inside} embed -> embed {inside}"
        ),
        Rule(
            f"{at}.position_bias",
            f"{to}.position_bias",
            f"{rate} {inside} -> {rate} {inside}",
        ),
        norm(f"{at}.kv_norm", f"{to}.norm", width),
    )


_AT, _TO = "self_attn.compressor", "self_attn.compressor"
_INDEX_AT, _INDEX_TO = f"{_AT}.indexer", "self_attn.indexer"
_OF_KIND: Mapping[str | None, Rules] = {
    None: (),
    "heavy": _compressor(_AT, _TO, "heavy_rate", "head_dim", "head_dim"),
    "sparse": (
        *_compressor(_AT, _TO, "sparse_rate", "head_dim", "two_head_dims"),
        *_compressor(
            _INDEX_AT,
            f"{_INDEX_TO}.compressor",
            "sparse_rate",
            "index_dim",
            "two_index_dims",
        ),
        *linear(
            f"{_INDEX_AT}.q_b_proj",
            f"{_INDEX_TO}.q_proj",
            "(index_heads index_dim) q_rank -> q_rank index_heads index_dim",
        ),
        *linear(
            f"{_INDEX_AT}.scorer.weights_proj",
            f"{_INDEX_TO}.weights_proj",
            "index_heads embed -> embed index_heads",
        ),
    ),
}


def connection(at: str, to: str, mixes: str, factors: str) -> Rules:
    """Returns the rules of weights of residual streams.

    Args:
      at: What the names of the file begin with.
      to: Module of the model.
      mixes: Dim that counts the weights.
      factors: Dim that counts their factors.
    """
    to = f"{to}.projection"
    return (
        Rule(
            f"{at}fn",
            f"{to}.kernel",
            f"{mixes} (streams embed) -> streams embed {mixes}",
        ),
        Rule(f"{at}base", f"{to}.base", f"{mixes} -> {mixes}"),
        Rule(f"{at}scale", f"{to}.scale", f"{factors} -> {factors}"),
    )


_CONNECTIONS = (
    *connection("attn_hc.", "mixer_connection", "stream_mixes", "three"),
    *connection("ffn_hc.", "mlp_connection", "stream_mixes", "three"),
)
_SHARED = tuple(
    Rule(
        f"mlp.shared_experts.{name}.weight",
        f"mlp.shared_expert.{name}.kernel",
        layout,
    )
    for name, layout in (
        ("gate_proj", "shared_mlp embed -> embed shared_mlp"),
        ("up_proj", "shared_mlp embed -> embed shared_mlp"),
        ("down_proj", "embed shared_mlp -> shared_mlp embed"),
    )
)
_ROUTER = linear("mlp.gate", "mlp.router.gate", "experts embed -> embed experts")
_BIAS = Rule(
    "mlp.gate.e_score_correction_bias",
    "mlp.router.correction_bias",
    "experts -> experts",
)
_NORMS = (
    norm("input_layernorm", "input_layernorm"),
    norm("post_attention_layernorm", "pre_feedforward_layernorm"),
)


def _layer(kind: LayerKind, of_experts: Rules) -> Rules:
    """Returns the rules of a layer, by transformers' names."""
    return (
        *_ATTENTION,
        *_OF_KIND[kind.compresses],
        *_CONNECTIONS,
        *_ROUTER,
        *(() if kind.hashes else (_BIAS,)),
        *of_experts,
        *_SHARED,
        *_NORMS,
    )


_NAMES_OF_RELEASES: Mapping[str, str] = {
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    **{
        f"{theirs}.{name}": f"{released}.{short}"
        for theirs, released in (
            (_AT, "attn.compressor"),
            (_INDEX_AT, "attn.indexer.compressor"),
        )
        for name, short in (
            ("kv_proj.weight", "wkv.weight"),
            ("gate_proj.weight", "wgate.weight"),
            ("position_bias", "ape"),
            ("kv_norm.weight", "norm.weight"),
        )
    },
    f"{_INDEX_AT}.q_b_proj.weight": "attn.indexer.wq_b.weight",
    f"{_INDEX_AT}.scorer.weights_proj.weight": "attn.indexer.weights_proj.weight",
    **{
        f"{part}_hc.{name}": f"hc_{part}_{name}"
        for part in ("attn", "ffn")
        for name in ("fn", "base", "scale")
    },
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
# What transformers calls the norm of keys in layers that it writes.
_NAMES_WRITTEN = {**_NAMES_OF_RELEASES, "self_attn.kv_norm.weight": "attn.norm.weight"}
_EXPERTS = experts("ffn.experts.{expert}.", gate="w1", up="w3", down="w2")


def _outer(
    names: Mapping[str, str], table: str
) -> Callable[[DecoderConfig], tuple[Rule, ...]]:
    """Returns the rules of what belongs to no layer, and of the experts by token.

    Args:
      names: Names of the tensors, by those of transformers in memory.
      table: Name of a layer's experts by token.
    """

    def rules(config: DecoderConfig) -> tuple[Rule, ...]:
        own = outside()(config)
        own += connection("model.hc_head.hc_", "streams", "streams_out", "one")
        own = renamed(own, names)
        if config.hash_layers:
            layout = "vocab token_experts -> vocab token_experts"
            own += (Rule(table, "token_experts.table", layout, integers="int64"),)
        return own

    return rules


def _key_mapping(
    prefix: str,
    outer: Mapping[str, str],
    inner: Mapping[str, str],
    of_experts: Rules,
) -> KeyMapping:
    """Returns one of the ways to name the tensors.

    Args:
      prefix: What the names of a layer begin with.
      outer: Names of tensors outside of layers, by those of transformers in memory.
      inner: Names of a layer's tensors, likewise.
      of_experts: Rules of the experts.
    """

    def layer(config: DecoderConfig, kind: LayerKind) -> Rules:
        del config
        return renamed(_layer(kind, ()), inner) + of_experts

    at = "ffn" if inner else "mlp"
    table = prefix.format(layer="{hash_layer}") + f"{at}.gate.tid2eid"
    return KeyMapping(_outer(outer, table), Layers(prefix, layer))


_WRITTEN_OUTSIDE = {"lm_head.weight": "head.weight"}
_RELEASED_OUTSIDE = {
    **_WRITTEN_OUTSIDE,
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    **{
        f"model.hc_head.hc_{name}": f"hc_head_{name}"
        for name in ("fn", "base", "scale")
    },
}
_LAYERS = "model.layers.{layer}."
KEY_MAPPINGS = (
    _key_mapping(_LAYERS, _WRITTEN_OUTSIDE, _NAMES_WRITTEN, _EXPERTS),
    _key_mapping(_LAYERS, {}, {}, FUSED_EXPERTS),
    _key_mapping("layers.{layer}.", _RELEASED_OUTSIDE, _NAMES_OF_RELEASES, _EXPERTS),
)
"""Names that transformers writes, those it has in memory, and those of the releases."""


def ignore(config: DecoderConfig) -> tuple[str, ...]:
    """A tied head, by any of its names."""
    return (*ignore_tied_head(config), "head.weight") * config.tie_word_embeddings
