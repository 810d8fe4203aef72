"""Model family of a Megatron config, inferred because no field names it."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from bridge.families._family import Family
from bridge.hf._config import build_config, find_family, to_hf_config
from bridge.megatron.config._training import read_training
from bridge.models import DecoderConfig

TWINS = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "smollm3", "granite"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"),
)
"""Families with an equivalent in Megatron, in the order in which they are tried."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Special tokens, which no Megatron field records; see `DecoderConfig`."""

    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None


def settle(
    values: Mapping[str, Any],
    fields: Mapping[str, Any],
    tokens: Tokens,
    model_type: str | None,
) -> DecoderConfig:
    """Builds the config of the first family whose config files can express `values`.

    Args:
      values: Values read from the fields, by our dotted names.
      fields: Megatron fields, for values that only training uses.
      tokens: Special tokens.
      model_type: Model family; None tries `TWINS`, in order.

    Returns:
      Model config of the family.

    Raises:
      ValueError: If the config files of `model_type`, or of all families if it is None,
        cannot express the values.
    """
    values = {**values, **dataclasses.asdict(tokens)}
    if model_type is not None:
        return _of_family(find_family(model_type), values, fields)
    reasons = []
    for name in TWINS:
        try:
            return _of_family(find_family(name), values, fields)
        except ValueError as error:
            reasons += [f"  {name}: {line.strip()}" for line in _reasons(error)]
    raise ValueError(
        "No family's config files can express this:\n" + "\n".join(reasons)
    )


def _reasons(error: ValueError) -> list[str]:
    lines = str(error).splitlines()
    return lines[1:] or lines


def _of_family(
    family: Family, values: Mapping[str, Any], fields: Mapping[str, Any]
) -> DecoderConfig:
    values = {**values, **_roundings(family, values)}
    values["passthrough"] = read_training(fields, family.passthrough)
    first_error = None
    for said in _as_files_say(values):
        try:
            config = build_config(family, said)
            to_hf_config(config)
        except ValueError as error:
            first_error = first_error or error
        else:
            return config
    assert first_error is not None
    raise first_error


def _roundings(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the family's values where families differ only in rounding.

    Megatron does not distinguish these values. For example, softmax over all scores
    divided by the sum over the chosen experts equals softmax over the chosen experts.
    """
    constants, settled = family.constants, {}
    if values["norm"] == "rms" and constants.get("norm") == "rms_wide":
        settled["norm"] = "rms_wide"
    if "moe.num_experts" not in values:
        return settled
    for name in ("moe.rounded_weights", "moe.float32_logits"):
        settled[name] = constants.get(name, False)
    if values["moe.n_group"] is None:  # without groups, nothing reads group_scoring
        settled["moe.group_scoring"] = constants.get("moe.group_scoring", "max")
    chosen = "softmax_of_chosen"
    one = values["moe.scoring"] == "softmax" and values["moe.norm_topk_prob"]
    if one and constants.get("moe.scoring") == chosen:
        settled |= {"moe.scoring": chosen, "moe.norm_topk_prob": False}
    return settled


def _as_files_say(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields `values`, and a second form if every layer has a sliding window.

    Some families' files then record only the window, others also `layer_types`.
    """
    yield values
    if values["sliding_window"] is not None and values["layer_types"] is None:
        all_slide = ("sliding_attention",) * values["num_hidden_layers"]
        yield {**values, "layer_types": all_slide}
