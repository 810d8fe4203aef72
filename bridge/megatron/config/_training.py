"""Fields that only training uses and that config files of both sides have."""

from collections.abc import Mapping
from typing import Any

from bridge.models import DecoderConfig

_CARRIED = {
    "moe_aux_loss_coeff": ("aux_loss_alpha", "router_aux_loss_coef"),
    "moe_input_jitter_eps": ("router_jitter_noise",),
    "attention_dropout": ("attention_dropout", "attn_pdrop"),
    "hidden_dropout": ("resid_pdrop",),
}
"""Megatron's field names, each with the names that families use for it."""

_FURTHER, _OUR_FURTHER = "mtp_num_layers", "num_nextn_predict_layers"
TRAINING = frozenset((*_CARRIED, _FURTHER))
"""Names of the Megatron fields that `read_training` reads."""


def write_training(config: DecoderConfig) -> dict[str, Any]:
    """Returns Megatron's training fields; 0 where the family has no value."""
    passthrough = dict(config.passthrough)
    values = {
        theirs: next(
            (passthrough[name] for name in names if passthrough.get(name)), 0.0
        )
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
    """Returns a family's passthrough fields, with values from Megatron's fields.

    Args:
      fields: Megatron's fields by name.
      defaults: Passthrough fields of the family, with transformers' defaults.

    Returns:
      Pairs of name and value, in the order of `defaults`.

    Raises:
      ValueError: If the model has multi-token-prediction layers but the family has no
        field for their number.
    """
    passthrough, further = dict(defaults), fields.get(_FURTHER)
    if further and _OUR_FURTHER not in passthrough:
        raise ValueError(f"{_FURTHER} = {further}: no layers of this family's")
    if _OUR_FURTHER in passthrough:  # Megatron's default is 0, the family's may differ
        passthrough[_OUR_FURTHER] = further or 0
    for theirs, names in _CARRIED.items():
        name = next((name for name in names if name in passthrough), None)
        value = fields.get(theirs, 0.0)
        if name is None or isinstance(value, list | tuple):
            continue  # config files cannot express a list with one value per loss
        passthrough[name] = value or (None if passthrough[name] is None else 0.0)
    return tuple(passthrough.items())
