"""LongCat-Flash: experts beside a dense branch, some of which compute nothing.

transformers makes a gate and an up projection for the experts that compute nothing too,
reads them nowhere, and refuses a file without them, as the published ones are. An
import leaves them out; an export is of the published form.

Source: transformers `configuration_longcat_flash.py`, `modeling_longcat_flash.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families import _deepseek
from bridge.families._blocks import (
    FUSED_EXPERTS,
    Rules,
    experts,
    ignore_tied_head,
    key_mapping,
    latent_attention,
    mlp,
    norm,
    router,
)
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import moe, tokens
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_BRANCH = "dense_branch."
_PARTS: Rules = (
    norm("input_layernorm.0", "input_layernorm"),
    norm("post_attention_layernorm.0", "pre_feedforward_layernorm"),
    norm("input_layernorm.1", _BRANCH + "input_layernorm"),
    norm("post_attention_layernorm.1", _BRANCH + "pre_feedforward_layernorm"),
    *router("mlp.router.classifier"),
    Rule(
        "mlp.router.e_score_correction_bias",
        "mlp.router.correction_bias",
        "choices -> choices",
    ),
)


def _layer(run: Rules) -> Callable[[DecoderConfig, LayerKind], Rules]:
    def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
        del kind
        return (
            *_PARTS,
            *run,
            *latent_attention(config, "self_attn.0."),
            *latent_attention(config, "self_attn.1.", _BRANCH + "self_attn."),
            *mlp(config, "mlps.0.", _BRANCH + "first_mlp."),
            *mlp(config, "mlps.1.", _BRANCH + "mlp."),
        )

    return rules


def _read_layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    layers, attentions = fields[_LAYERS], fields[_ATTENTIONS]
    if attentions not in (None, 2 * layers):
        raise ValueError(
            f"{_ATTENTIONS} = {attentions!r}: it counts the two attentions of each of "
            f"{_LAYERS} = {layers!r} layers, {2 * layers}. Leave it out"
        )
    return {"num_hidden_layers": layers}


_LAYERS, _ATTENTIONS = "num_layers", "num_hidden_layers"
_LAYER_COUNT = FieldTransform(
    (_LAYERS, _ATTENTIONS),
    _read_layers,
    lambda config: {_LAYERS: config.num_hidden_layers},
    {_LAYERS: 28, _ATTENTIONS: None},
)


def _write_sizes(config: DecoderConfig) -> dict[str, Any]:
    assert config.mla is not None
    rope_dim = config.mla.qk_rope_head_dim
    return {"head_dim": rope_dim, "qk_head_dim": config.mla.qk_head_dim}


def _ignore(config: DecoderConfig) -> tuple[str, ...]:
    """The tensors of experts that compute nothing, and of a tied head."""
    assert config.moe is not None
    numbers = range(config.moe.num_experts, config.moe.num_choices)
    unused = tuple(f"model.layers.{{layer}}.mlp.experts.{i}.**" for i in numbers)
    return unused + ignore_tied_head(config)


FAMILY = Family(
    model_type="longcat_flash",
    architecture="LongcatFlashForCausalLM",
    fields={
        **{
            name: field
            for name, field in _deepseek.FIELDS.items()
            if name not in ("num_hidden_layers", "intermediate_size")
        },
        **tokens(1, 2),
        **moe(
            num_experts=("n_routed_experts", 512),
            routed_scaling_factor=("routed_scaling_factor", 6.0),
        ),
        "zero_expert_num": Field(256, "moe.num_zero_experts"),
        "moe_topk": Field(12, "moe.num_experts_per_tok", ("num_experts_per_tok",)),
        "expert_ffn_hidden_size": Field(
            2048, "moe.intermediate_size", ("moe_intermediate_size",)
        ),
        "ffn_hidden_size": Field(12288, "intermediate_size", ("intermediate_size",)),
        "max_position_embeddings": Field(131072),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(
        _LAYER_COUNT,
        rope(10000000.0, interleaved=True),
        FieldTransform(
            _deepseek.DERIVED_SIZES.names,
            _deepseek.DERIVED_SIZES.read,
            _write_sizes,
            {"head_dim": 64, "qk_head_dim": None},
        ),
    ),
    constants={
        "dense_branch": True,
        "mla.scale_latents": True,
        "moe.correction_bias": True,
        "moe.float32_logits": True,
    },
    fixed={"hidden_act": "silu", "attention_dropout": 0.0, "router_bias": False},
    passthrough={"output_router_logits": False},
    # Of published files: what the model has always.
    inert={
        "attention_method": "MLA",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
    },
    key_mappings=(key_mapping(_layer(experts())), key_mapping(_layer(FUSED_EXPERTS))),
    ignore=_ignore,
)
