"""Ministral 8B: Mistral of which layers slide or not, each by its type.

Source: transformers `configuration_ministral.py`, `modeling_ministral.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bridge.families import mistral
from bridge.families._family import Field
from bridge.families._hf_rope import rope
from bridge.families._layer_types import FULL, SLIDING, sliding_or_full


def _same_for_all(fields: Mapping[str, Any]) -> list[str]:
    kind = FULL if fields["sliding_window"] is None else SLIDING
    return [kind] * fields["num_hidden_layers"]


FAMILY = dataclasses.replace(
    mistral.FAMILY,
    model_type="ministral",
    architecture="MinistralForCausalLM",
    fields={**mistral.FAMILY.fields, "sliding_window": Field(4096)},
    transforms=(rope(), sliding_or_full(_same_for_all)),
)
