"""Config of a PEFT LoRA adapter: supported and rejected fields.

Source: huggingface/peft src/peft/tuners/lora/config.py::LoraConfig
"""

import dataclasses
import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bridge._local_path import check_local
from bridge.formats._json import read_json

CONFIG_NAME = "adapter_config.json"

# Fields without effect on the merged weights. The adapted modules are taken from the
# tensor names.
_UNREAD = {
    *("auto_mapping", "bias", "exclude_modules"),
    *("inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout"),
    "ensure_weight_tying",
    *("megatron_core", "modules_to_save", "peft_type", "peft_version", "revision"),
    *("qalora_group_size", "target_modules", "task_type"),
}
_READ = {
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("fan_in_fan_out", "use_dora", "base_model_name_or_path"),
}
# Initializations that leave the base weights unchanged: PiSSA, OLoRA, CorDA and LoftQ
# subtract from them.
_PLAIN_INITS = (True, False, "gaussian", "orthogonal")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Ranks and scales of an adapter's factors, with PEFT's field names.

    Args:
      r: Default rank of the factors.
      lora_alpha: Default numerator of the scale, `lora_alpha / r`.
      use_rslora: Whether the scale is `lora_alpha / sqrt(r)` instead.
      rank_pattern: Ranks of modules whose path ends in the given name, of which a dot
        is any character, as in PEFT.
      alpha_pattern: Values of `lora_alpha` of modules, likewise.
      fan_in_fan_out: Whether the file says that the base model stores weights as
        `[in, out]`, like GPT-2. It is kept; what the base stores decides, as in PEFT.
      use_dora: Whether the adapter has a magnitude for each output beside its factors
        (DoRA). Such an adapter is merged and not kept beside the weights.
      base_model_name_or_path: Directory or hub id of the base model; None for unsaid.
      fields: All fields of the file that was read, kept for saving.

    Examples:
      >>> lora_config = bridge.LoraConfig(r=4, lora_alpha=8, rank_pattern={"q_proj": 2})
      >>> lora_config.scale("layers.0.self_attn.q_proj")
      4.0
    """

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fan_in_fan_out: bool = False
    use_dora: bool = False
    base_model_name_or_path: str | None = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def rank(self, module: str) -> int:
        """Returns the rank of a module's factors."""
        return _by_ending(self.rank_pattern, module, self.r)

    def alpha(self, module: str) -> float:
        """Returns the numerator of the scale of a module's factors."""
        return _by_ending(self.alpha_pattern, module, self.lora_alpha)

    def scale(self, module: str) -> float:
        """Returns the scale of the product of a module's factors."""
        rank = self.rank(module)
        return self.alpha(module) / (math.sqrt(rank) if self.use_rslora else rank)

    def to_json(self, modules: Collection[str]) -> dict[str, Any]:
        """Returns the fields of `adapter_config.json`, including all that were read.

        Args:
          modules: Paths of the adapted modules.
        """
        targets = sorted({name.rpartition(".")[2] for name in modules})
        fields = self.fields or {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model_name_or_path,
            "inference_mode": True,
            "target_modules": targets,
            "bias": "none",
            "lora_dropout": 0.0,
        }
        if self.fields:
            fields = {**fields, "target_modules": self._targets(modules)}
        return {
            **fields,
            "r": self.r,
            "lora_alpha": self.lora_alpha,
            "use_rslora": self.use_rslora,
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": dict(self.alpha_pattern),
            "fan_in_fan_out": self.fan_in_fan_out,
        }

    def _targets(self, modules: Collection[str]) -> Any:
        """Returns the targets that were read, and what else is adapted by now."""
        targets = self.fields.get("target_modules")
        if isinstance(targets, str):
            covers = targets == "all-linear" or all(
                re.fullmatch(targets, name) for name in modules
            )
            return targets if covers else sorted(modules)
        known = list(targets or ())
        missing = {
            name.rpartition(".")[2]
            for name in modules
            if not any(name == one or name.endswith(f".{one}") for one in known)
        }
        return [*known, *sorted(missing)]


def read_lora_config(path: str | os.PathLike[str]) -> LoraConfig:
    """Reads `adapter_config.json`.

    Args:
      path: Directory of the adapter.

    Raises:
      FileNotFoundError: If the directory has no such file.
      ValueError: If it is not a LoRA config, or sets unsupported fields. All are
        listed.
    """
    check_local(path)
    file = Path(path) / CONFIG_NAME
    if not file.is_file():
        raise FileNotFoundError(f"No adapter at '{path}': it has no '{CONFIG_NAME}'.")
    fields = read_json(file, f"'{file}'")
    if wrong := _refusals(fields):
        raise ValueError(f"'{file}' cannot be followed:\n" + "\n".join(wrong))
    read = {name: fields[name] for name in _READ & set(fields)}
    read = {name: value for name, value in read.items() if value is not None}
    return LoraConfig(**read, fields=fields)


def _refusals(fields: Mapping[str, Any]) -> list[str]:
    if fields.get("peft_type") != "LORA":
        return [f"  peft_type is {fields.get('peft_type')!r}, not 'LORA'"]
    wrong = [
        f"  {name}={value!r} is not modelled"
        for name, value in fields.items()
        if name not in _UNREAD | _READ | {"init_lora_weights"} and value
    ]
    init = fields.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        wrong.append(f"  init_lora_weights={init!r} changes the base weights")
    if not _is_positive(fields.get("r"), int):
        wrong.append(f"  r={fields.get('r')!r} is not a positive integer")
    if not _is_positive(fields.get("lora_alpha")):
        wrong.append(
            f"  lora_alpha={fields.get('lora_alpha')!r} is not a positive number"
        )
    for name in ("use_rslora", "fan_in_fan_out", "use_dora"):
        if not isinstance(fields.get(name) or False, bool):
            wrong.append(f"  {name}={fields[name]!r} is neither true nor false")
    return (
        wrong
        + _bad_pattern("rank_pattern", fields)
        + _bad_pattern("alpha_pattern", fields)
    )


def _bad_pattern(name: str, fields: Mapping[str, Any]) -> list[str]:
    """Describes invalid entries; PEFT's regular expressions are not supported."""
    pattern = fields.get(name) or {}
    if not isinstance(pattern, dict):
        return [f"  {name}={pattern!r} is not an object"]
    kind = int if name == "rank_pattern" else (int, float)
    return [
        f"  {name}: {key!r}: {value!r} is not a name with a number"
        for key, value in pattern.items()
        if not re.fullmatch(r"\^?[\w.]+", key) or not _is_positive(value, kind)
    ]


def _is_positive(value: Any, kind: type | tuple[type, ...] = (int, float)) -> bool:
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


def _by_ending(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Returns the value of the first pattern that matches, as PEFT matches them.

    Names, dots and a leading `^` are all that a pattern may hold: see `_bad_pattern`.

    Source: huggingface/peft src/peft/utils/other.py::get_pattern_key
    """
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
