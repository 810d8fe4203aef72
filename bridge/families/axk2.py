"""A.X K2: DeepSeek-V3.2 with gates of norms, and of the output of attention.

The gates of attention are projected with the queries, of their latent vector before and
after its norm. The score of an expert of a group that is not chosen is 0, above one
that its bias made negative.

Source: transformers `configuration_axk2.py`, `modeling_axk2.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping

from bridge.families import _deepseek, deepseek_v32
from bridge.families._blocks import (
    FUSED_EXPERTS,
    Rules,
    experts,
    ignore_tied_head,
    key_mapping,
    linear,
    mlp,
    norm,
    renamed,
    router,
)
from bridge.families._family import Field
from bridge.families._fields import tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import first_dense_or_by_type
from bridge.models import DecoderConfig, LayerKind

_MLP_NORM = ("post_attention_layernorm", "pre_feedforward_layernorm")


def _gated_norm(source: str, destination: str) -> Rules:
    return (
        norm(f"{source}.norm", destination),
        *linear(
            f"{source}.mlp.fc1",
            f"{destination}.gate_down",
            "norm_rank embed -> embed norm_rank",
        ),
        *linear(
            f"{source}.mlp.fc2",
            f"{destination}.gate_up",
            "embed norm_rank -> norm_rank embed",
        ),
    )


_PUBLISHED = {
    "self_attn.q_gate_proj.weight": "self_attn.q_b_proj.weight",
    **{
        f"{at}.{ours}.weight": f"{at}.{theirs}.weight"
        for at in ("input_layernorm", "post_attention_layernorm")
        for ours, theirs in (
            ("norm", "norm"),
            ("mlp.fc1", "W_down"),
            ("mlp.fc2", "W_up"),
        )
    },
}


def _layer(
    run: Rules, names: Mapping[str, str]
) -> Callable[[DecoderConfig, LayerKind], Rules]:
    """Returns the rules of a layer.

    Args:
      run: Rules of its experts.
      names: Names of its tensors, by those of transformers in memory.
    """

    def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
        own = deepseek_v32.attend(config, kind)
        own += _gated_norm("input_layernorm", "input_layernorm")
        if kind.channels == "sparse":
            beside = _deepseek.corrected_and_shared(config)
            own += (*router(), *run, *beside, *_gated_norm(*_MLP_NORM))
        else:
            own += (*mlp(config), norm(*_MLP_NORM))
        return renamed(own, names)

    return rules


_BASE = deepseek_v32.FAMILY
_FIELDS = _BASE.fields

FAMILY = dataclasses.replace(
    _BASE,
    model_type="axk2",
    architecture="AXK2ForCausalLM",
    fields={
        **_FIELDS,
        **{name: Field(None, f"moe.{name}") for name in ("n_group", "topk_group")},
        **tokens(163691, 163691),
        "num_key_value_heads": Field(32),
        "max_position_embeddings": Field(131072),
        "n_routed_experts": dataclasses.replace(
            _FIELDS["n_routed_experts"], default=128
        ),
        "moe_intermediate_size": dataclasses.replace(
            _FIELDS["moe_intermediate_size"], default=512
        ),
        "kv_lora_rank": Field(128, "mla.kv_lora_rank"),
        "q_lora_rank": Field(384, "mla.q_lora_rank"),
        "qk_rope_head_dim": Field(32, "mla.qk_rope_head_dim"),
        "qk_nope_head_dim": Field(64, "mla.qk_nope_head_dim"),
        "v_head_dim": Field(64, "mla.v_head_dim"),
        "index_n_heads": Field(16, "indexer.num_heads"),
        "gated_norm_rank": Field(16, "norm_gate_rank"),
    },
    transforms=(
        rope(interleaved=True),
        first_dense_or_by_type(1),
        _deepseek.shared_experts(1),
        deepseek_v32.TYPES,
    ),
    constants={
        "moe.scoring": "sigmoid",
        "moe.group_scoring": "top2_sum_zeroed",
        "moe.correction_bias": True,
        "moe.float32_logits": True,
        "mla.gated_queries": True,
    },
    fixed={k: v for k, v in _BASE.fixed.items() if k != "mlp_bias"},
    passthrough={"output_router_logits": False},
    aliases={},
    left_out={},
    key_mappings=(
        key_mapping(_layer(experts(), _PUBLISHED)),
        key_mapping(_layer(FUSED_EXPERTS, {})),
    ),
    module_names=1,
    ignore=ignore_tied_head,
)
