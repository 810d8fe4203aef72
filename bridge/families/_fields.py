"""Fields that many families' config files share."""

from collections.abc import Mapping
from typing import Any

from bridge.families._family import Field
from bridge.families._field_transform import FieldTransform

SIZES: Mapping[str, Field] = {
    "vocab_size": Field(),
    "hidden_size": Field(),
    "intermediate_size": Field(),
    "num_hidden_layers": Field(),
    "num_attention_heads": Field(),
    "num_key_value_heads": Field(None),
    "head_dim": Field(None),
    "max_position_embeddings": Field(),
    "initializer_range": Field(0.02),
    "tie_word_embeddings": Field(False),
}
"""Of nearly all; a family overrides what its own defaults are."""


def tokens(
    bos: int | None, eos: int | tuple[int, ...] | None, pad: int | None = None
) -> dict[str, Field]:
    """Returns the fields of the special tokens, with a family's defaults."""
    return {
        "bos_token_id": Field(bos),
        "eos_token_id": Field(eos),
        "pad_token_id": Field(pad),
    }


def attention_bias(default: bool = False, *, out: bool = True) -> dict[str, Field]:
    """Returns the field that gives q, k, v and, unless told otherwise, o biases."""
    both = ("attention_bias", "attention_out_bias")
    return {"attention_bias": Field(default, both if out else None)}


def qk_norm_switch(field: str, kind: str, *, default: bool = False) -> FieldTransform:
    """Reads the field that says whether queries and keys are normed, as `kind`."""
    return FieldTransform(
        (field,),
        lambda fields: {"qk_norm": kind if fields[field] else None},
        lambda config: {field: config.qk_norm is not None},
        {field: default},
    )


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def moe(**names: tuple[str, Any]) -> dict[str, Field]:
    """Returns fields of the experts: `moe(num_experts=("num_local_experts", 8))`.

    How many there are goes by three names, and transformers 5 writes another than the
    hub's files have; all are read.
    """
    others = {
        file: tuple(name for name in _EXPERT_COUNTS if name != file)
        for file in _EXPERT_COUNTS
    }
    return {
        file: Field(default, f"moe.{ours}", others.get(file, ()))
        for ours, (file, default) in names.items()
    }


EXPERT_TRAINING: Mapping[str, Any] = {
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
"""What a mixture of experts is trained with, and no logit depends on."""
