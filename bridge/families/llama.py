"""Llama 2, 3, 3.1, 3.2, 3.3, and the many models that are Llama by another name.

Source: transformers `configuration_llama.py`, `modeling_llama.py`.
"""

from bridge.families._blocks import dense_layer, ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    also_named=("paddleocr_vl_text",),  # text part of PaddleOCR-VL
    fields={
        **SIZES,
        **tokens(1, 2),
        **attention_bias(),
        "max_position_embeddings": Field(2048),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
        "mlp_bias": Field(False),
    },
    transforms=(rope(),),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
)
