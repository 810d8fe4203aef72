"""Which family a Megatron config is of: its fields have no name for that."""

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
"""The families whose models can be Megatron's, in the order in which they are tried."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The special tokens, which no field says; see `DecoderConfig`."""

    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None


def settle(
    values: Mapping[str, Any],
    fields: Mapping[str, Any],
    tokens: Tokens,
    model_type: str | None,
) -> DecoderConfig:
    """Builds the config of the family whose files can say all of it.

    Args:
      values: What the fields say, by our dotted names.
      fields: The fields, for what training alone reads.
      tokens: The special tokens.
      model_type: The family; None tries `TWINS`, in order.

    Raises:
      ValueError: If the family's files cannot say it, or no family's can.
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
    raise ValueError("No family's config files can say this:\n" + "\n".join(reasons))


def _reasons(error: ValueError) -> list[str]:
    lines = str(error).splitlines()
    return lines[1:] or lines


def _of_family(
    family: Family, values: Mapping[str, Any], fields: Mapping[str, Any]
) -> DecoderConfig:
    values = {**values, **_roundings(family, values)}
    values["carried"] = read_training(fields, family.carried)
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
    """Returns what is one to Megatron, and differs between families in the last bits.

    Softmax of all scores, divided by the sum of the chosen, is softmax of the chosen.
    """
    traits, settled = family.traits, {}
    if values["norm"] == "rms" and traits.get("norm") == "rms_wide":
        settled["norm"] = "rms_wide"
    if "moe.num_experts" not in values:
        return settled
    for name in ("moe.rounded_weights", "moe.float32_logits"):
        settled[name] = traits.get(name, False)
    if values["moe.n_group"] is None:  # and nothing reads it
        settled["moe.group_scoring"] = traits.get("moe.group_scoring", "max")
    chosen = "softmax_of_chosen"
    one = values["moe.scoring"] == "softmax" and values["moe.norm_topk_prob"]
    if one and traits.get("moe.scoring") == chosen:
        settled |= {"moe.scoring": chosen, "moe.norm_topk_prob": False}
    return settled


def _as_files_say(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the same, spelled as some files and as others: if all layers slide."""
    yield values
    if values["sliding_window"] is not None and values["layer_types"] is None:
        all_slide = ("sliding_attention",) * values["num_hidden_layers"]
        yield {**values, "layer_types": all_slide}
