"""Fields that training alone reads, and that config files of both sides have."""

from collections.abc import Mapping
from typing import Any

from bridge.models import DecoderConfig

_CARRIED = {
    "moe_aux_loss_coeff": ("aux_loss_alpha", "router_aux_loss_coef"),
    "moe_input_jitter_eps": ("router_jitter_noise",),
    "attention_dropout": ("attention_dropout", "attn_pdrop"),
    "hidden_dropout": ("resid_pdrop",),
}
"""Megatron's name, and the names that families carry it by."""

_FURTHER, _OUR_FURTHER = "mtp_num_layers", "num_nextn_predict_layers"
TRAINING = frozenset((*_CARRIED, _FURTHER))
"""The fields that are read here."""


def write_training(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields; without a value of the family's, the rate is 0."""
    carried = dict(config.carried)
    values = {
        theirs: next((carried[name] for name in names if carried.get(name)), 0.0)
        for theirs, names in _CARRIED.items()
    }
    jitter = values.pop("moe_input_jitter_eps")
    if config.moe is None:
        del values["moe_aux_loss_coeff"]
        return values
    return {**values, "moe_input_jitter_eps": jitter or None}


def read_training(
    fields: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[tuple[str, Any], ...]:
    """Returns what a family carries, with the values that Megatron's fields have.

    Args:
      fields: Of Megatron.
      defaults: What the family carries, with transformers' defaults.

    Raises:
      ValueError: If there are layers that predict further tokens, and the family's
        files have none, to be left out.
    """
    carried, further = dict(defaults), fields.get(_FURTHER)
    if further and _OUR_FURTHER not in carried:
        raise ValueError(f"{_FURTHER} = {further}: no layers of this family's")
    if _OUR_FURTHER in carried:  # Megatron has none where its field is not set
        carried[_OUR_FURTHER] = further or 0
    for theirs, names in _CARRIED.items():
        name = next((name for name in names if name in carried), None)
        value = fields.get(theirs, 0.0)
        if name is None or isinstance(value, list | tuple):
            continue  # one coefficient for each of several losses: no file says that
        carried[name] = value or (None if carried[name] is None else 0.0)
    return tuple(carried.items())
