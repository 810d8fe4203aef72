"""The families that can be imported and exported, by their `model_type`."""

from types import MappingProxyType

from bridge._family import Family
from bridge.families import llama

FAMILIES = MappingProxyType[str, Family](
    {family.model_type: family for family in (llama.FAMILY,)}
)
