"""Rules of the parts of a layer that many families share, without their prefix.

Rows of q and k are in the order in which the family turns them, in the files and in
the model alike, so no rule permutes them.
"""

from bridge.families._family import KeyMapping, Layers
from bridge.models import DecoderConfig
from bridge.rules._rules import Rule

Rules = tuple[Rule, ...]

EMBED = Rule(
    "model.embed_tokens.weight", "embed_tokens.embedding", "vocab embed -> vocab embed"
)
NORM = Rule("model.norm.weight", "norm.scale", "embed -> embed")
HEAD = Rule("lm_head.weight", "lm_head.kernel", "vocab embed -> embed vocab")

_Q = (
    "(heads head_dim) embed -> embed heads head_dim",
    "(heads head_dim) -> heads head_dim",
)
_KV = tuple(side.replace("heads", "kv_heads") for side in _Q)
_O = ("embed (heads v_head_dim) -> heads v_head_dim embed", "embed -> embed")

PRE_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
}
"""The names of Llama's files: the second is before the MLP, whatever it says."""


def linear(
    source: str, destination: str, kernel: str, bias: str | None = None
) -> Rules:
    """Rules of a projection: its kernel and, with a pattern for it, its bias."""
    rules = (Rule(f"{source}.weight", f"{destination}.kernel", kernel),)
    if bias is not None:
        rules += (Rule(f"{source}.bias", f"{destination}.bias", bias),)
    return rules


def attention(config: DecoderConfig) -> Rules:
    """q, k, v and o apart, with the biases and norms that the config has."""
    at, rules = "self_attn.", ()
    for name, layout in (("q_proj", _Q), ("k_proj", _KV), ("v_proj", _KV)):
        bias = layout[1] if config.attention_bias else None
        rules += linear(at + name, at + name, layout[0], bias)
    return rules + attention_out(config) + head_norms(config)


def attention_out(config: DecoderConfig) -> Rules:
    """The projection back."""
    name = "self_attn.o_proj"
    return linear(name, name, _O[0], _O[1] if config.attention_out_bias else None)


def head_norms(config: DecoderConfig) -> Rules:
    """The norms of queries and keys, if there are any."""
    if config.qk_norm is None:
        return ()
    layouts = {
        "head": ("head_dim -> head_dim",) * 2,
        "per_head": (
            "heads head_dim -> heads head_dim",
            "kv_heads head_dim -> kv_heads head_dim",
        ),
        "full": (_Q[1], _KV[1]),
    }[config.qk_norm]
    return tuple(
        Rule(f"self_attn.{name}.weight", f"self_attn.{name}.scale", layout)
        for name, layout in zip(("q_norm", "k_norm"), layouts, strict=True)
    )


def latent_attention(config: DecoderConfig) -> Rules:
    """Latent attention, queries narrow or not."""
    mla, at = config.mla, "self_attn."
    assert mla is not None
    kernel = "(heads head_dim) {0} -> {0} heads head_dim"
    bias = config.attention_bias
    if mla.q_lora_rank is None:
        rules = linear(at + "q_proj", at + "q_proj", kernel.format("embed"))
    else:
        rules = (
            *_same(at + "q_a_proj", "q_rank embed -> embed q_rank", "q_rank", bias),
            norm(at + "q_a_layernorm", at + "q_a_layernorm", "q_rank"),
            *_same(at + "q_b_proj", kernel.format("q_rank")),
        )
    wide = "kv_rank_and_rope"
    return (
        *rules,
        *_same(at + "kv_a_proj_with_mqa", f"{wide} embed -> embed {wide}", wide, bias),
        norm(at + "kv_a_layernorm", at + "kv_a_layernorm", "kv_rank"),
        *_same(
            at + "kv_b_proj",
            "(heads nope_and_v) kv_rank -> kv_rank heads nope_and_v",
        ),
        *attention_out(config),
    )


def mlp(
    config: DecoderConfig, at: str = "mlp.", to: str = "mlp.", width: str = "mlp"
) -> Rules:
    """Gate, up and down apart, with biases if the config has them."""
    biased = config.mlp_bias and width == "mlp"
    inside, back = f"{width} -> {width}", "embed -> embed"
    rules = ()
    for name in ("gate_proj", "up_proj"):
        layout = f"{width} embed -> embed {width}"
        rules += linear(at + name, to + name, layout, inside if biased else None)
    layout = f"embed {width} -> {width} embed"
    name = "down_proj"
    return rules + linear(at + name, to + name, layout, back if biased else None)


def fused_gate_up(config: DecoderConfig) -> Rules:
    """Gate and up as one tensor of the file, gate first."""
    del config
    return (
        Rule(
            "mlp.gate_up_proj.weight",
            ("mlp.gate_proj.kernel", "mlp.up_proj.kernel"),
            ("mlp embed -> embed mlp",) * 2,
        ),
        *linear("mlp.down_proj", "mlp.down_proj", "embed mlp -> mlp embed"),
    )


def experts(
    at: str = "mlp.experts.{expert}.",
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
) -> Rules:
    """Experts as tensors of their own, in the model one stack with gate beside up."""
    return (
        Rule(
            (f"{at}{gate}.weight", f"{at}{up}.weight"),
            "mlp.experts.gate_up_proj",
            "(one expert_mlp) embed -> embed one expert_mlp",
            dim=1,
        ),
        Rule(
            f"{at}{down}.weight",
            "mlp.experts.down_proj",
            "embed expert_mlp -> expert_mlp embed",
        ),
    )


FUSED_EXPERTS = (
    Rule(
        "mlp.experts.gate_up_proj",
        "mlp.experts.gate_up_proj",
        "experts (two expert_mlp) embed -> experts embed two expert_mlp",
    ),
    Rule(
        "mlp.experts.down_proj",
        "mlp.experts.down_proj",
        "experts embed expert_mlp -> experts expert_mlp embed",
    ),
)
"""All experts of a layer as one tensor, as transformers 5 holds them in memory."""


def router(at: str = "mlp.gate") -> Rules:
    """The router's projection."""
    return linear(at, "mlp.router.gate", "experts embed -> embed experts")


def norm(source: str, destination: str, dim: str = "embed") -> Rule:
    """The scale of a norm."""
    return Rule(f"{source}.weight", f"{destination}.scale", f"{dim} -> {dim}")


def norms(names: dict[str, str]) -> Rules:
    """The norms of a layer, by their names in the file."""
    return tuple(norm(source, destination) for source, destination in names.items())


def outer(config: DecoderConfig) -> Rules:
    """Embedding, last norm, and the head if it is not the embedding."""
    return (EMBED, NORM) + (() if config.tie_word_embeddings else (HEAD,))


def dense_layer(config: DecoderConfig, sparse: bool) -> Rules:
    """A layer of Llama's names."""
    del sparse
    return attention(config) + mlp(config) + norms(PRE_NORMS)


def key_mapping(layer, at: str = "model.layers.{layer}.") -> KeyMapping:
    """The names of most files: Llama's outside of layers, and `layer`'s in them."""
    return KeyMapping(outer, Layers(at, layer))


def ignore_tied_head(config: DecoderConfig) -> tuple[str, ...]:
    """A tied head, if it is stored, is the embedding."""
    return ("lm_head.weight",) if config.tie_word_embeddings else ()


def ignore_stale(config: DecoderConfig) -> tuple[str, ...]:
    """Old files hold frequencies, which follow from the config."""
    inside = "model.layers.{layer}.self_attn.rotary_emb.inv_freq"
    return (inside, "model.rotary_emb.inv_freq", *ignore_tied_head(config))


def _same(
    name: str, kernel: str, dim: str | None = None, biased: bool = False
) -> Rules:
    bias = f"{dim} -> {dim}" if biased else None
    return linear(name, name, kernel, bias)
