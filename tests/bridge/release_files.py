"""Files of releases with code of their own, made of those that transformers writes.

Nothing here owes anything to the tables under test: fields are those of the published
config files, tensors are laid out as the code of each release splits them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Fields = dict[str, Any]
Tensors = dict[str, np.ndarray]

WIDTH, HEADS, GROUPS, HEAD_DIM, LAYERS = 48, 4, 2, 16, 2
_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)")


@dataclasses.dataclass(frozen=True)
class Release:
    """How a release's files differ from those of a family that computes the same.

    Attributes:
      variant: Variant of the family, see `tiny_configs`.
      changes: What its config says otherwise.
      config: The release's config file.
      outside: Name in the release by the name of a tensor that is of no layer.
      layer: Name in the release by the name of a tensor of a layer.
      fused: For a tensor of the release, the tensors that it is made of, and how.
      at: What the names of a layer's tensors begin with.
    """

    variant: str
    changes: Fields
    config: Fields
    outside: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layer: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fused: Mapping[str, tuple[tuple[str, ...], Callable[..., np.ndarray]]] = (
        dataclasses.field(default_factory=dict)
    )
    at: str = "model.layers.{}."

    def tensors(self, family: Tensors) -> Tensors:
        """Returns the tensors of the release."""
        layers = {}
        renamed = {}
        for name, value in family.items():
            if match := _LAYER.fullmatch(name):
                layers.setdefault(int(match[1]), {})[match[2]] = value
            else:
                renamed[self.outside.get(name, name)] = value
        for number, of_layer in layers.items():
            at = self.at.format(number)
            for name, (parts, join) in self.fused.items():
                if parts[0] in of_layer:
                    joined = join(*(of_layer.pop(part) for part in parts))
                    renamed[at + name] = joined
            for name, value in of_layer.items():
                renamed[at + self._in_layer(name)] = value
        return renamed

    def _in_layer(self, name: str) -> str:
        for old, new in self.layer.items():
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name


def in_turn(*parts: np.ndarray) -> np.ndarray:
    """The rows of all queries, then of keys, then of values."""
    return np.concatenate(parts)


def by_group(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """For each head of keys the rows of its queries, then its own, then its values."""
    head_dim, groups = WIDTH // HEADS, GROUPS
    split = [x.reshape(groups, -1, head_dim, *x.shape[1:]) for x in (q, k, v)]
    return np.concatenate(split, axis=1).reshape(-1, *q.shape[1:])


def _qkv(
    name: str,
    join: Callable[..., np.ndarray] = in_turn,
    kinds: tuple[str, ...] = ("weight",),
) -> dict[str, tuple[tuple[str, ...], Callable[..., np.ndarray]]]:
    return {
        f"{name}.{kind}": (tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv"), join)
        for kind in kinds
    }


_BOTH = ("weight", "bias")
_SIZES = {
    "vocab_size": 131,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
_LLAMA = {
    **_SIZES,
    "intermediate_size": 80,
    "num_key_value_heads": GROUPS,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "rope_theta": 10000.0,
}


def remote(kind: str, file: str) -> Fields:
    """The field that names the code of a release."""
    return {"auto_map": {"AutoModelForCausalLM": f"{file}.{kind}"}}


RELEASES: dict[str, Release] = {
    "qwen": Release(
        "qwen2",
        {"num_key_value_heads": HEADS, "num_hidden_layers": LAYERS},
        {
            **_SIZES,
            "architectures": ["QWenLMHeadModel"],
            **remote("QWenLMHeadModel", "modeling_qwen"),
            "attn_dropout_prob": 0.0,
            "bf16": True,
            "emb_dropout_prob": 0.0,
            "intermediate_size": 160,
            "kv_channels": WIDTH // HEADS,
            "layer_norm_epsilon": 1e-6,
            "max_position_embeddings": 256,
            "no_bias": True,
            "rotary_emb_base": 10000,
            "rotary_pct": 1.0,
            "scale_attn_weights": True,
            "seq_length": 2048,
            "use_dynamic_ntk": True,
            "use_flash_attn": "auto",
            "use_logn_attn": True,
        },
        {
            "model.embed_tokens.weight": "transformer.wte.weight",
            "model.norm.weight": "transformer.ln_f.weight",
        },
        {
            "self_attn.o_proj": "attn.c_proj",
            "mlp.gate_proj": "mlp.w2",
            "mlp.up_proj": "mlp.w1",
            "mlp.down_proj": "mlp.c_proj",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
        },
        _qkv("attn.c_attn", kinds=_BOTH),
        "transformer.h.{}.",
    ),
    "chatglm": Release(
        "glm",
        {"rms_norm_eps": 1e-5},
        {
            "hidden_size": WIDTH,
            "num_attention_heads": HEADS,
            "architectures": ["ChatGLMModel"],
            **remote("ChatGLMForConditionalGeneration", "modeling_chatglm"),
            "add_bias_linear": False,
            "add_qkv_bias": True,
            "apply_query_key_layer_scaling": True,
            "apply_residual_connection_post_layernorm": False,
            "attention_softmax_in_fp32": True,
            "ffn_hidden_size": 80,
            "kv_channels": HEAD_DIM,
            "layernorm_epsilon": 1e-5,
            "multi_query_attention": True,
            "multi_query_group_num": GROUPS,
            "num_layers": LAYERS,
            "original_rope": True,
            "padded_vocab_size": 131,
            "post_layer_norm": True,
            "rmsnorm": True,
            "seq_length": 256,
            "tie_word_embeddings": False,
        },
        {
            "model.embed_tokens.weight": "transformer.embedding.word_embeddings.weight",
            "model.norm.weight": "transformer.encoder.final_layernorm.weight",
            "lm_head.weight": "transformer.output_layer.weight",
        },
        {
            "self_attn.o_proj": "self_attention.dense",
            "mlp.gate_up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        _qkv("self_attention.query_key_value", kinds=_BOTH),
        "transformer.encoder.layers.{}.",
    ),
    "phi-msft": Release(
        "phi",
        {"num_key_value_heads": HEADS, "hidden_act": "gelu_new"},
        {
            "architectures": ["PhiForCausalLM"],
            **remote("PhiForCausalLM", "modeling_phi"),
            "activation_function": "gelu_new",
            "attn_pdrop": 0.0,
            "flash_rotary": True,
            "layer_norm_epsilon": 1e-5,
            "n_embd": WIDTH,
            "n_head": HEADS,
            "n_head_kv": None,
            "n_inner": 80,
            "n_layer": LAYERS,
            "n_positions": 256,
            "rotary_dim": 6,  # half of a head
            "tie_word_embeddings": False,
            "vocab_size": 131,
        },
        {
            "model.embed_tokens.weight": "transformer.embd.wte.weight",
            "model.final_layernorm.weight": "lm_head.ln.weight",
            "model.final_layernorm.bias": "lm_head.ln.bias",
            "lm_head.weight": "lm_head.linear.weight",
            "lm_head.bias": "lm_head.linear.bias",
        },
        {"self_attn.dense": "mixer.out_proj", "input_layernorm": "ln"},
        _qkv("mixer.Wqkv", kinds=_BOTH),
        "transformer.h.{}.",
    ),
    "mimo": Release(
        "qwen2",
        {"num_hidden_layers": LAYERS},
        {
            **_LLAMA,
            "architectures": ["MiMoForCausalLM"],
            "attention_bias": True,
            "num_nextn_predict_layers": 0,
            "use_mrope": False,
            "use_sliding_window": False,
        },
    ),
    "internlm2": Release(
        "llama",
        {"num_hidden_layers": LAYERS},
        {
            **_LLAMA,
            "architectures": ["InternLM2ForCausalLM"],
            **remote("InternLM2ForCausalLM", "modeling_internlm2"),
            "bias": False,
        },
        {
            "model.embed_tokens.weight": "model.tok_embeddings.weight",
            "lm_head.weight": "output.weight",
        },
        {
            "self_attn.o_proj": "attention.wo",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
        },
        _qkv("attention.wqkv", by_group),
    ),
    "internlm": Release(
        "llama",
        {"num_hidden_layers": LAYERS, "attention_bias": True},
        {
            **_LLAMA,
            "architectures": ["InternLMForCausalLM"],
            **remote("InternLMForCausalLM", "modeling_internlm"),
            "bias": True,
        },
    ),
    "minicpm": Release(
        "granite",
        {
            "num_hidden_layers": LAYERS,
            "embedding_multiplier": 12,
            "residual_multiplier": 1.4 / LAYERS**0.5,
            "attention_multiplier": (WIDTH // HEADS) ** -0.5,
            "logits_scaling": WIDTH / 64,
        },
        {
            **_LLAMA,
            "architectures": ["MiniCPMForCausalLM"],
            **remote("MiniCPMForCausalLM", "modeling_minicpm"),
            "dim_model_base": 64,
            "scale_depth": 1.4,
            "scale_emb": 12,
        },
    ),
    "bailing_moe_v2": Release(
        "glm4_moe",
        {"head_dim": 12, "topk_group": 1},
        {
            **_LLAMA,
            "architectures": ["BailingMoeV2ForCausalLM"],
            **remote("BailingMoeV2ForCausalLM", "modeling_bailing_moe_v2"),
            "embedding_dropout": 0.0,
            "first_k_dense_replace": 1,
            "head_dim": 12,
            "max_window_layers": 20,
            "moe_intermediate_size": 24,
            "moe_router_enable_expert_bias": True,
            "mtp_loss_scaling_factor": 0,
            "n_group": 2,
            "norm_topk_prob": True,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_nextn_predict_layers": 0,
            "num_shared_experts": 1,
            "partial_rotary_factor": 0.5,
            "rotary_dim": 6,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.5,
            "router_dtype": "fp32",
            "score_function": "sigmoid",
            "topk_group": 1,
            "use_bias": False,
            "use_qk_norm": True,
            "use_qkv_bias": False,
        },
        {"model.embed_tokens.weight": "model.word_embeddings.weight"},
        {
            "self_attn.o_proj": "attention.dense",
            "self_attn.q_norm": "attention.query_layernorm",
            "self_attn.k_norm": "attention.key_layernorm",
            "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
        },
        _qkv("attention.query_key_value"),
    ),
    "hunyuan": Release(
        "hunyuan_moe",
        {},
        {
            **_LLAMA,
            "architectures": ["HunYuanMoEV1ForCausalLM"],
            **remote("HunYuanMoEV1ForCausalLM", "hunyuan"),
            "attention_head_dim": HEAD_DIM,
            "moe_intermediate_size": [80, 80],
            "moe_topk": [2, 2],
            "norm_type": "rms",
            "num_experts": 4,
            "num_shared_expert": [1, 1],
            "pool_type": "last",
            "rms_norm_eps": 1e-5,
            "use_cla": False,
            "use_mixed_mlp_moe": True,
            "use_qk_norm": True,
            "vit_token": 64,
        },
    ),
    "RefinedWebModel": Release(
        "falcon",
        {},
        {
            "architectures": ["RWForCausalLM"],
            **remote("RWForCausalLM", "modelling_RW"),
            "alibi": False,
            "bias": False,
            "ffn_hidden_size": 80,
            "hidden_size": WIDTH,
            "multi_query": True,
            "n_head": HEADS,
            "n_layer": LAYERS,
            "parallel_attn": True,
            "vocab_size": 131,
        },
        at="transformer.h.{}.",
    ),
    "RefinedWeb": Release(
        "falcon-40b",
        {},
        {
            "architectures": ["RWForCausalLM"],
            **remote("RWForCausalLM", "modelling_RW"),
            "bias": True,
            "ffn_hidden_size": 80,
            "hidden_size": WIDTH,
            "n_head": HEADS,
            "n_head_kv": GROUPS,
            "n_layer": LAYERS,
            "vocab_size": 131,
        },
        at="transformer.h.{}.",
    ),
}
