"""Releases whose code was beside the weights, under names of its own.

Each is the table of a family of `bridge.families` that computes the same, read from
other fields and other tensors. What is imported is that family's, and so is an export:
transformers loads it without running the code of the release.
"""

from types import MappingProxyType

from bridge.families._family import Family
from bridge.families.releases import (
    bailing_moe_v2,
    chatglm,
    hunyuan,
    internlm,
    internlm2,
    mimo,
    minicpm,
    phi_msft,
    qwen,
    refined_web,
)

_MODULES = (
    *(bailing_moe_v2, chatglm, hunyuan, internlm, internlm2, mimo, minicpm),
    *(phi_msft, qwen),
)
_TABLES = (
    *(module.FAMILY for module in _MODULES),
    refined_web.SMALL,
    refined_web.LARGE,
)

RELEASES = MappingProxyType[str, Family]({table.model_type: table for table in _TABLES})
"""Tables of releases by the `model_type` of their config files."""
