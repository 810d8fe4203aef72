"""Llama 2, 3, 3.1, 3.2, 3.3, and the many models that are Llama by another name.

Rows of q and k are in half-rotation order in the files and in the model alike, so
no rule permutes them.

Source: transformers `configuration_llama.py`, `modeling_llama.py`.
"""

from bridge._family import REQUIRED, Family
from bridge._rules import Rule
from bridge.models import DecoderConfig

_ATTENTION = "model.layers.{layer}.self_attn."
_MLP = "model.layers.{layer}.mlp."

_WEIGHTS = (
    Rule(
        "model.embed_tokens.weight",
        "embed_tokens.embedding",
        "vocab embed -> vocab embed",
    ),
    Rule(
        "model.layers.{layer}.input_layernorm.weight",
        "layers.input_layernorm.scale",
        "embed -> embed",
    ),
    Rule(
        _ATTENTION + "q_proj.weight",
        "layers.self_attn.q_proj.kernel",
        "(heads head_dim) embed -> embed heads head_dim",
    ),
    Rule(
        _ATTENTION + "k_proj.weight",
        "layers.self_attn.k_proj.kernel",
        "(kv_heads head_dim) embed -> embed kv_heads head_dim",
    ),
    Rule(
        _ATTENTION + "v_proj.weight",
        "layers.self_attn.v_proj.kernel",
        "(kv_heads head_dim) embed -> embed kv_heads head_dim",
    ),
    Rule(
        _ATTENTION + "o_proj.weight",
        "layers.self_attn.o_proj.kernel",
        "embed (heads head_dim) -> heads head_dim embed",
    ),
    Rule(
        "model.layers.{layer}.post_attention_layernorm.weight",
        "layers.post_attention_layernorm.scale",
        "embed -> embed",
    ),
    Rule(
        _MLP + "gate_proj.weight",
        "layers.mlp.gate_proj.kernel",
        "mlp embed -> embed mlp",
    ),
    Rule(
        _MLP + "up_proj.weight",
        "layers.mlp.up_proj.kernel",
        "mlp embed -> embed mlp",
    ),
    Rule(
        _MLP + "down_proj.weight",
        "layers.mlp.down_proj.kernel",
        "embed mlp -> mlp embed",
    ),
    Rule("model.norm.weight", "norm.scale", "embed -> embed"),
)
_ATTENTION_BIASES = (
    Rule(
        _ATTENTION + "q_proj.bias",
        "layers.self_attn.q_proj.bias",
        "(heads head_dim) -> heads head_dim",
    ),
    Rule(
        _ATTENTION + "k_proj.bias",
        "layers.self_attn.k_proj.bias",
        "(kv_heads head_dim) -> kv_heads head_dim",
    ),
    Rule(
        _ATTENTION + "v_proj.bias",
        "layers.self_attn.v_proj.bias",
        "(kv_heads head_dim) -> kv_heads head_dim",
    ),
    Rule(
        _ATTENTION + "o_proj.bias",
        "layers.self_attn.o_proj.bias",
        "embed -> embed",
    ),
)
_MLP_BIASES = (
    Rule(_MLP + "gate_proj.bias", "layers.mlp.gate_proj.bias", "mlp -> mlp"),
    Rule(_MLP + "up_proj.bias", "layers.mlp.up_proj.bias", "mlp -> mlp"),
    Rule(_MLP + "down_proj.bias", "layers.mlp.down_proj.bias", "embed -> embed"),
)
_HEAD = (Rule("lm_head.weight", "lm_head.kernel", "vocab embed -> embed vocab"),)


def _rules(config: DecoderConfig) -> tuple[Rule, ...]:
    return (
        _WEIGHTS
        + (_ATTENTION_BIASES if config.attention_bias else ())
        + (_MLP_BIASES if config.mlp_bias else ())
        + (() if config.tie_word_embeddings else _HEAD)
    )


def _ignore(config: DecoderConfig) -> tuple[str, ...]:
    # Frequencies follow from the config; a tied head, if stored, is the embedding.
    frequencies = (_ATTENTION + "rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
    return frequencies + (("lm_head.weight",) if config.tie_word_embeddings else ())


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields={
        "vocab_size": REQUIRED,
        "hidden_size": REQUIRED,
        "intermediate_size": REQUIRED,
        "num_hidden_layers": REQUIRED,
        "num_attention_heads": REQUIRED,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    },
    fixed={"hidden_act": "silu", "attention_dropout": 0.0, "pretraining_tp": 1},
    rules=_rules,
    ignore=_ignore,
)
