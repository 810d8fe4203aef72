"""Falcon 7B and 40B before transformers had them.

Source: tiiuae/falcon-7b `configuration_RW.py`, `modelling_RW.py`.
"""

import dataclasses

from bridge.families import falcon
from bridge.families._family import Field
from bridge.families._field_transform import FieldTransform


def _architecture(**defaults: bool) -> tuple[FieldTransform, ...]:
    """Falcon's transforms, with what the code takes where a file does not say."""
    *others, architecture = falcon.FAMILY.transforms
    read = {**architecture.defaults, **defaults}
    return *others, dataclasses.replace(architecture, defaults=read)


SMALL = dataclasses.replace(
    falcon.FAMILY,
    model_type="RefinedWebModel",
    architecture="RWForCausalLM",
    written_as=falcon.FAMILY.model_type,
    fields={
        **falcon.FAMILY.fields,
        "num_hidden_layers": Field(2, aliases=("n_layer",)),
        "num_attention_heads": Field(8, aliases=("n_head",)),
        "tie_word_embeddings": Field(True),
    },
    transforms=_architecture(multi_query=False, parallel_attn=False),
    aliases={"n_head_kv": "num_kv_heads"},
)
"""The 7B, whose heads share one head of keys and values."""

LARGE = dataclasses.replace(
    SMALL,
    model_type="RefinedWeb",
    transforms=_architecture(new_decoder_architecture=True),
)
"""The 40B, with heads of keys and values for groups of heads."""
