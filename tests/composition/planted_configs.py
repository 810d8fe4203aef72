"""Faults put into bridge, to see how soon mutated configs find them.

Those that were there once, of a family each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from composition.planted import Fault

from bridge.families import _hf_rope
from bridge.families._family import Family, Field
from bridge.families._layer_types import first_dense
from bridge.hf import _config, _hf_checkpoint


@dataclasses.dataclass(frozen=True)
class PlantedConfig:
    """A fault, and the family whose files it reads otherwise.

    Attributes:
      model_type: Family of the configs that are mutated.
      fault: See `planted`.
    """

    model_type: str
    fault: Fault


def _without(check: str, owner: Any) -> Fault:
    return ((owner, check, lambda original: lambda *_: None),)


def _in_family(name: str, change: Callable[[Family], Family]) -> Fault:
    def changed(families: Any) -> Any:
        return {**families, name: change(families[name])}

    return ((_config, "FAMILIES", changed),)


def _carried(name: str, value: Any) -> Callable[[Family], Family]:
    return lambda f: dataclasses.replace(f, passthrough={**f.passthrough, name: value})


def _inert(name: str) -> Callable[[Family], Family]:
    """Any value of a field is taken that is read by nobody."""

    def change(family: Family) -> Family:
        fixed = {n: v for n, v in family.fixed.items() if n != name}
        passthrough = {**family.passthrough, name: family.fixed[name]}
        return dataclasses.replace(family, fixed=fixed, passthrough=passthrough)

    return change


def _with_field(name: str, field: Field) -> Callable[[Family], Family]:
    def change(family: Family) -> Family:
        passthrough = {n: v for n, v in family.passthrough.items() if n != name}
        fields = {**family.fields, name: field}
        return dataclasses.replace(family, fields=fields, passthrough=passthrough)

    return change


def _all_sparse(family: Family) -> Family:
    """As many dense layers as in a file that does not say, none."""
    transforms = [
        first_dense(0) if one.names == ("first_k_dense_replace",) else one
        for one in family.transforms
    ]
    return dataclasses.replace(family, transforms=tuple(transforms))


PLANTED_CONFIGS: Mapping[str, PlantedConfig] = {
    "another head dropped": PlantedConfig(
        "llama", _without("check_tied_head", _hf_checkpoint)
    ),
    "heads turned in part, or not": PlantedConfig(
        "qwen3", _without("_check_whole", _hf_rope)
    ),
    "an unread cap applied": PlantedConfig(
        "gemma3_text",
        _in_family("gemma3_text", _with_field("attn_logit_softcapping", Field(None))),
    ),
    "windows from layer 0": PlantedConfig(
        "qwen2", _in_family("qwen2", _carried("max_window_layers", 0))
    ),
    "no dense layers": PlantedConfig(
        "deepseek_v3", _in_family("deepseek_v3", _all_sparse)
    ),
    "another activation": PlantedConfig(
        "granite", _in_family("granite", _inert("hidden_act"))
    ),
}
"""What is wrong -> the fault."""
