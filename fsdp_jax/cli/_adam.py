"""Adam's settings of a Megatron checkpoint, with which a run resumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.megatron import AdamSettings

_ADAM = "adam"  # Key in the metadata of an import, until a run has trained it.
# Fields of `AdamSettings` -> options of `fsdp-jax train`.
_FROM_MEGATRON = {
    **{name: name for name in ("lr", "weight_decay", "b1", "b2", "eps", "no_decay")},
    "clip_grad": "clip",
}


def option(name: str) -> str:
    """Returns the option of a field of `AdamSettings`."""
    return f"--{_FROM_MEGATRON.get(name, name).replace('_', '-')}"


def stored_settings(settings: AdamSettings) -> dict[str, Any]:
    """Returns the metadata of a step for settings.

    Args:
      settings: Settings from `bridge.megatron.load_megatron_adam`.
    """
    values = {ours: getattr(settings, name) for name, ours in _FROM_MEGATRON.items()}
    known = {name: x for name, x in values.items() if x is not None}
    if settings.no_decay is not None:
        known["no_decay"] = ",".join(settings.no_decay)
    opened = {_FROM_MEGATRON[name]: told for name, told in settings.open.items()}
    return {"known": known, "open": opened}


def settings_of_import(
    metadata: Mapping[str, Any], typed: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the settings of the run that a checkpoint was imported from.

    Args:
      metadata: Metadata of the checkpoint.
      typed: Options given on the command line, which replace the settings.

    Raises:
      ValueError: If a setting that the checkpoint lacks is not given.
    """
    unknown = dict.fromkeys(
        _FROM_MEGATRON.values(), "not kept by the version that imported it"
    )
    adam = metadata.get(_ADAM, {"known": {}, "open": unknown})
    needed = {name: told for name, told in adam["open"].items() if name not in typed}
    if needed:
        lines = [f"{option(name)}: {told}" for name, told in needed.items()]
        raise ValueError(
            f"Adam continues with its settings, but {len(needed)} of them are not in "
            "the Megatron checkpoint:\n  " + "\n  ".join(lines) + "\nGive each as an "
            "option; a learning rate or weight decay that followed a schedule "
            "continues as a constant."
        )
    return adam["known"]
