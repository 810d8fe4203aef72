"""Rules of the parts of a layer that many families share, without their prefix.

Rows of q and k are in the order in which the family rotates them, in the files and in
the model alike, so no rule permutes them.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import partial

from bridge.families._family import KeyMapping, Layers
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

Rules = tuple[Rule, ...]

HEAD = Rule("lm_head.weight", "lm_head.kernel", "vocab embed -> embed vocab")

# Grouped-query attention (GQA): queries have `heads`, keys and values `kv_heads`, whose
# numbers `sizes_of` takes from `num_attention_heads` and `num_key_value_heads`.
_Q = (
    "(heads head_dim) embed -> embed heads head_dim",
    "(heads head_dim) -> heads head_dim",
)
_KV = tuple(side.replace("heads", "kv_heads") for side in _Q)
_V = tuple(side.replace("head_dim", "v_head_dim") for side in _KV)
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


def attention(
    config: DecoderConfig,
    at: str = "self_attn.",
    out: str = "o_proj",
    norms: tuple[str, str] | None = ("q_norm", "k_norm"),
) -> Rules:
    """q, k, v and o apart, with the biases and norms that the config has.

    Args:
      config: The model.
      at: Prefix of their names in the file.
      out: Name of the projection back.
      norms: Names of the norms of queries and keys; None to leave them out.
    """
    rules = ()
    for name, layout in (("q_proj", _Q), ("k_proj", _KV), ("v_proj", _V)):
        bias = layout[1] if config.attention_bias else None
        rules += linear(at + name, f"self_attn.{name}", layout[0], bias)
    of_heads = () if norms is None else head_norms(config, at, norms)
    return rules + attention_out(config, at + out) + of_heads


def of_full_layers(rules: Rules) -> Rules:
    """Rules with the sizes of full-attention layers, where they have their own."""
    return tuple(
        dataclasses.replace(rule, layout=_OF_FULL.sub(r"full_\1", str(rule.layout)))
        for rule in rules
    )


_OF_FULL = re.compile(r"\b(head_dim|v_head_dim|heads|kv_heads)\b")


def attention_out(
    config: DecoderConfig,
    name: str = "self_attn.o_proj",
    to: str = "self_attn.o_proj",
) -> Rules:
    """The projection back."""
    bias = _O[1] if config.attention_out_bias else None
    return linear(name, to, _O[0], bias)


def head_norms(
    config: DecoderConfig,
    at: str = "self_attn.",
    names: tuple[str, str] = ("q_norm", "k_norm"),
) -> Rules:
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
    leaves = [("weight", "scale"), *([("bias", "bias")] * config.qk_norm_bias)]
    return tuple(
        Rule(f"{at}{name}.{theirs}", f"self_attn.{norm}.{leaf}", layout)
        for theirs, leaf in leaves
        for name, norm, layout in zip(names, ("q_norm", "k_norm"), layouts, strict=True)
    )


def latent_attention(
    config: DecoderConfig, at: str = "self_attn.", to: str = "self_attn."
) -> Rules:
    """Latent attention, queries narrow or not.

    Args:
      config: The model.
      at: Prefix of its names in the file.
      to: Prefix of its names in a layer of the model.
    """
    mla = config.mla
    assert mla is not None
    same = partial(_same, at, to)
    kernel = "(heads head_dim) {0} -> {0} heads head_dim"
    bias = config.attention_bias
    if mla.q_lora_rank is None:
        rules = same("q_proj", kernel.format("embed"))
    else:
        rules = (
            *same("q_a_proj", "q_rank embed -> embed q_rank", "q_rank", bias),
            norm(at + "q_a_layernorm", to + "q_a_layernorm", "q_rank"),
            *(
                same(
                    "q_gate_proj",
                    "(heads query_and_gate) two_q_ranks -> "
                    "two_q_ranks heads query_and_gate",
                )
                if mla.gated_queries
                else same("q_b_proj", kernel.format("q_rank"))
            ),
        )
    wide = "kv_rank_and_rope"
    return (
        *rules,
        *same("kv_a_proj_with_mqa", f"{wide} embed -> embed {wide}", wide, bias),
        norm(at + "kv_a_layernorm", to + "kv_a_layernorm", "kv_rank"),
        *same("kv_b_proj", "(heads nope_and_v) kv_rank -> kv_rank heads nope_and_v"),
        *attention_out(config, at + "o_proj", to + "o_proj"),
    )


def ungated_mlp(
    config: DecoderConfig, up: str = "mlp.up_proj", down: str = "mlp.down_proj"
) -> Rules:
    """Up and down alone, with biases if the config has them."""
    inside, back = ("mlp -> mlp", "embed -> embed") if config.mlp_bias else (None, None)
    return (
        *linear(up, "mlp.up_proj", "mlp embed -> embed mlp", inside),
        *linear(down, "mlp.down_proj", "embed mlp -> mlp embed", back),
    )


def mlp(
    config: DecoderConfig, at: str = "mlp.", to: str = "mlp.", width: str = "mlp"
) -> Rules:
    """Gate, if there is one, up and down apart, with the biases that the config has."""
    biased = config.mlp_bias and width.startswith("mlp")
    inside, back = f"{width} -> {width}", "embed -> embed"
    rules = ()
    for name in ("gate_proj", "up_proj")[not config.gated_mlp :]:
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
    return linear(at, "mlp.router.gate", "choices embed -> embed choices")


def norm(source: str, destination: str, dim: str = "embed") -> Rule:
    """The scale of a norm."""
    return Rule(f"{source}.weight", f"{destination}.scale", f"{dim} -> {dim}")


def norms(names: Mapping[str, str], *, bias: bool = False) -> Rules:
    """The norms of a layer, by their names in the file."""
    rules = [norm(source, destination) for source, destination in names.items()]
    if bias:
        rules += [
            Rule(f"{source}.bias", f"{destination}.bias", "embed -> embed")
            for source, destination in names.items()
        ]
    return tuple(rules)


def outside(
    embed: str = "model.embed_tokens", norm: str = "model.norm", head: str = "lm_head"
) -> Callable[[DecoderConfig], Rules]:
    """Returns the rules of what belongs to no layer.

    Args:
      embed: Name of the embedding.
      norm: Name of the norm behind the last layer.
      head: Name of the output projection, which a tied model has not.
    """

    def rules(config: DecoderConfig) -> Rules:
        table = "vocab embed -> vocab embed"
        found = (Rule(f"{embed}.weight", "embed_tokens.embedding", table),)
        if config.norm_scale:
            found += norms({norm: "norm"}, bias=config.norm_bias)
        bias = "vocab -> vocab" if config.head_bias else None
        own = linear(head, "lm_head", "vocab embed -> embed vocab", bias)
        return found + (own[1:] if config.tie_word_embeddings else own)

    return rules


def dense_layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    """A layer of Llama's names, with the norms and biases that the config has."""
    del kind
    own = norms(PRE_NORMS, bias=config.norm_bias) if config.norm_scale else ()
    return attention(config) + mlp(config) + own


def key_mapping(layer, at: str = "model.layers.{layer}.") -> KeyMapping:
    """The names of most files: Llama's outside of layers, and `layer`'s in them."""
    return KeyMapping(outside(), Layers(at, layer))


def ignore_tied_head(config: DecoderConfig) -> tuple[str, ...]:
    """A tied head, if it is stored, is the embedding."""
    return ("lm_head.weight",) if config.tie_word_embeddings else ()


def _same(
    at: str,
    to: str,
    name: str,
    kernel: str,
    dim: str | None = None,
    biased: bool = False,
) -> Rules:
    bias = f"{dim} -> {dim}" if biased else None
    return linear(at + name, to + name, kernel, bias)


def renamed(rules: Rules, names: Mapping[str, str]) -> Rules:
    """Returns rules of tensors that have other names; those without one keep theirs.

    Args:
      rules: Rules by the names of transformers in memory.
      names: Other names, by these.
    """
    return tuple(
        dataclasses.replace(
            rule, source=tuple(names.get(name, name) for name in rule.sources)
        )
        for rule in rules
    )
