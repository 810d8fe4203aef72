"""nanochat: norms that do not scale, a rope that turns the other way, squared ReLU.

Source: transformers `configuration_nanochat.py`, `modeling_nanochat.py`.
"""

from bridge.families._blocks import (
    Rules,
    attention,
    ignore_tied_head,
    key_mapping,
    ungated_mlp,
)
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return attention(config, norms=None) + ungated_mlp(config, "mlp.fc1", "mlp.fc2")


FAMILY = Family(
    model_type="nanochat",
    architecture="NanoChatForCausalLM",
    fields={
        **{name: field for name, field in SIZES.items() if name != "head_dim"},
        **tokens(0, 1, 1),
        **attention_bias(),
        "max_position_embeddings": Field(2048),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
        "hidden_act": Field("relu2"),
        "final_logit_softcapping": Field(15.0),
    },
    transforms=(rope(clockwise=True),),
    constants={
        "norm_scale": False,
        "gated_mlp": False,
        "embedding_norm": True,
        "qk_norm": "l2",
        "qk_norm_after_rope": True,
    },
    fixed={"attention_dropout": 0.0},
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
