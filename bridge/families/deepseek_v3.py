"""DeepSeek-V3, R1, and others of the architecture (Kimi K2, Moonlight).

The layers that predict further tokens, behind the last, are left out, as transformers
leaves them out: an import warns of those that it finds, and an export announces none.
Weights in FP8 are decoded by the source.

Source: transformers `configuration_deepseek_v3.py`, `modeling_deepseek_v3.py`.
"""

from bridge.families import _deepseek
from bridge.families._blocks import Rules, ignore_tied_head, latent_attention
from bridge.families._family import Family, Field
from bridge.families._fields import moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import first_dense
from bridge.families._sparse import key_mappings
from bridge.models import DecoderConfig
from bridge.rules._rules import Rule

_BIAS = Rule(
    "mlp.gate.e_score_correction_bias",
    "mlp.router.correction_bias",
    "experts -> experts",
)


def _beside(config: DecoderConfig) -> Rules:
    return (_BIAS, *_deepseek.shared(config))


_FURTHER = "num_nextn_predict_layers"


def _ignore(config: DecoderConfig) -> tuple[str, ...]:
    further = dict(config.carried)[_FURTHER] or 0
    last = config.num_hidden_layers
    layers = tuple(f"model.layers.{last + i}.**" for i in range(further))
    return layers + ignore_tied_head(config)


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fields={
        **_deepseek.FIELDS,
        **tokens(0, 1),
        "num_key_value_heads": Field(128),
        **moe(
            num_experts=("n_routed_experts", 256),
            num_experts_per_tok=("num_experts_per_tok", 8),
            intermediate_size=("moe_intermediate_size", 2048),
            norm_topk_prob=("norm_topk_prob", True),
            routed_scaling_factor=("routed_scaling_factor", 2.5),
            n_group=("n_group", 8),
            topk_group=("topk_group", 4),
        ),
        "max_position_embeddings": Field(4096),
    },
    codecs=(
        rope(interleaved=True, interleave_field="rope_interleave"),
        first_dense(3),
        _deepseek.shared_experts(1),
        _deepseek.DERIVED_SIZES,
    ),
    traits={
        "moe.scoring": "sigmoid",
        "moe.group_scoring": "top2_sum",
        "moe.correction_bias": True,
        "moe.float32_logits": True,
    },
    fixed={**_deepseek.FIXED, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    carried={**_deepseek.CARRIED, _FURTHER: 1},
    aliases={"num_mtp_layers": _FURTHER},
    left_out={_FURTHER: 0},
    key_mappings=key_mappings(latent_attention, _beside),
    ignore=_ignore,
)
