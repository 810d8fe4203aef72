"""CodeGen: GPT-J whose q, v and k are one tensor, in the four parts it was trained in.

Source: transformers `configuration_codegen.py`, `modeling_codegen.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bridge.families import gptj
from bridge.families._blocks import Rules, attention_out, norms, outside, ungated_mlp
from bridge.families._family import KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_PARTS = 4
_HEADS = "four heads_of_four"
_ROWS = f"({_HEADS} head_dim) embed -> embed ({_HEADS}) head_dim"


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return (
        Rule(
            "attn.qkv_proj.weight",
            tuple(f"self_attn.{name}_proj.kernel" for name in "qvk"),
            (_ROWS,) * 3,
            repeat="four",
        ),
        *attention_out(config, "attn.out_proj"),
        *ungated_mlp(config, "mlp.fc_in", "mlp.fc_out"),
        *norms({"ln_1": "input_layernorm"}, bias=True),
    )


def _read_heads(fields: Mapping[str, Any]) -> dict[str, Any]:
    heads = fields["n_head"]
    if not isinstance(heads, int) or heads % _PARTS:
        raise ValueError(
            f"n_head = {heads!r}: a multiple of {_PARTS}, the parts of q, v and k"
        )
    return {"num_attention_heads": heads}


_HEADS_OF_PARTS = FieldTransform(
    ("n_head",),
    _read_heads,
    lambda config: {"n_head": config.num_attention_heads},
    {"n_head": 16},
)

FAMILY = dataclasses.replace(
    gptj.FAMILY,
    model_type="codegen",
    architecture="CodeGenForCausalLM",
    fields={name: f for name, f in gptj.FAMILY.fields.items() if name != "n_head"},
    transforms=(*gptj.FAMILY.transforms, _HEADS_OF_PARTS),
    # A length that transformers keeps of old files, and reads nowhere.
    passthrough={**gptj.FAMILY.passthrough, "n_ctx": 2048},
    key_mappings=(
        KeyMapping(
            outside("transformer.wte", "transformer.ln_f"),
            Layers("transformer.h.{layer}.", _layer),
        ),
    ),
    ignore=lambda config: ("transformer.h.{layer}.attn.causal_mask",),
)
