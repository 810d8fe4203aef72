"""HunYuan-A13B: experts, and an MLP as wide as one that all tokens share.

Source: transformers `configuration_hunyuan_v1_moe.py`, `modeling_hunyuan_v1_moe.py`.
"""

from bridge.families import _hunyuan
from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    experts,
    ignore_tied_head,
    key_mapping,
    mlp,
    norms,
    router,
)
from bridge.families._family import Family, Field
from bridge.families._fields import moe
from bridge.models import DecoderConfig, LayerKind

_WIDTHS = ("intermediate_size", "moe.intermediate_size", "moe.shared_intermediate_size")


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    shared = mlp(config, "mlp.shared_mlp.", "mlp.shared_expert.", "shared_mlp")
    inner = router("mlp.gate.wg") + experts() + shared
    return _hunyuan.attend(config) + inner + norms(PRE_NORMS)


FAMILY = Family(
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    fields={
        **_hunyuan.FIELDS,
        **moe(num_experts=("num_experts", 1), num_experts_per_tok=("moe_topk", 1)),
        "intermediate_size": Field(11008, _WIDTHS),
    },
    transforms=(_hunyuan.ROPE,),
    constants={
        **_hunyuan.CONSTANTS,
        "moe.norm_topk_prob": True,
        "moe.float32_logits": True,
    },
    fixed=_hunyuan.FIXED,
    passthrough={**_hunyuan.PASSTHROUGH, "output_router_logits": False},
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
