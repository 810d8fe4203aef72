"""HunYuan 0.5B to 7B, and HunYuan-MT: Llama with heads normed after the rope.

Source: transformers `configuration_hunyuan_v1_dense.py`,
`modeling_hunyuan_v1_dense.py`.
"""

from bridge.families import _hunyuan
from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    ignore_tied_head,
    key_mapping,
    mlp,
    norms,
)
from bridge.families._family import Family
from bridge.models import DecoderConfig, LayerKind


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return _hunyuan.attend(config) + mlp(config) + norms(PRE_NORMS)


FAMILY = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    also_named=("hunyuan_vl_text",),  # text part of HunyuanOCR
    fields=_hunyuan.FIELDS,
    transforms=(_hunyuan.ROPE,),
    constants=_hunyuan.CONSTANTS,
    fixed=_hunyuan.FIXED,
    passthrough=_hunyuan.PASSTHROUGH,
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
