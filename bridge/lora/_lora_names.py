"""Names of an adapter's modules as the family of its model has them.

An adapter that was trained beside a multimodal model, or beside a base model without a
head, names modules as that model does.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bridge.hf._published_names import names_in_family, renamed
from bridge.lora._lora_config import LoraConfig
from bridge.lora._lora_source import PREFIX, LoraSource
from bridge.models import DecoderConfig
from bridge.rules._mapping import Mapping as WeightMapping

_TEXT_PARTS = {"model", "language_model", "text_model"}
"""Where models keep their texts' part. Layers of a vision tower have the same names."""


def in_family(
    adapter: LoraSource, mapping: WeightMapping, config: DecoderConfig
) -> LoraSource:
    """Renames an adapter's modules as the family of its model names them.

    Args:
      adapter: Adapter under any of the published names.
      mapping: Rules of the model.
      config: The model.

    Returns:
      The adapter; `adapter` itself if it has the family's names already. Modules of
      other parts keep their names. The config's patterns then name the modules as they
      are now.

    Raises:
      ValueError: If two modules have the same name in the family.
    """
    weights = {f"{module}.weight": module for module in adapter.modules}
    found = names_in_family((*weights, *adapter.whole), mapping, config)
    names = {key: name if _is_text(key, name) else key for key, name in found.items()}
    if all(name == key for key, name in names.items()):
        return adapter
    modules = {
        module: names[weight].removesuffix(".weight")
        for weight, module in weights.items()
    }
    whole = {names[key]: stored for key, stored in adapter.whole.items()}
    if len({*modules.values()}) < len(modules) or len(whole) < len(adapter.whole):
        raise ValueError(
            f"'{adapter.source.name}' holds modules twice, under several names: "
            f"{', '.join([*modules, *adapter.whole])}."
        )
    tensors = {
        f"{PREFIX}{new}{suffix}": f"{PREFIX}{old}{suffix}"
        for old, new in modules.items()
        for suffix in adapter.suffixes()
    }
    kept = {stored: stored for stored in whole.values()}
    return LoraSource(
        _with_modules(adapter.config, modules),
        renamed(adapter.source, tensors | kept),
        tuple(modules.values()),
        whole,
    )


def _is_text(key: str, name: str) -> bool:
    """Returns whether what a published name has before the family's is of texts."""
    parts, own = key.split("."), name.split(".")
    while parts and own and parts[-1] == own[-1]:
        parts.pop()
        own.pop()
    return set(parts) <= _TEXT_PARTS


def _with_modules(config: LoraConfig, modules: Mapping[str, str]) -> LoraConfig:
    """Returns a config whose patterns are the full names of renamed modules.

    A pattern may have named a part of a path that the family does not have.
    """
    ranks = {new: config.rank(old) for old, new in modules.items()}
    alphas = {new: config.alpha(old) for old, new in modules.items()}
    targets = sorted({name.rpartition(".")[2] for name in modules.values()})
    fields: dict[str, Any] = {**config.fields, "target_modules": targets}
    return dataclasses.replace(
        config,
        rank_pattern={k: rank for k, rank in ranks.items() if rank != config.r},
        alpha_pattern={k: a for k, a in alphas.items() if a != config.lora_alpha},
        fields=fields,
    )
