"""Config files of Hugging Face, to and from `DecoderConfig`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge._family import REQUIRED, Family
from bridge._hf_rope import ROPE_NAMES, read_rope, write_rope
from bridge._json import parse_json
from bridge.families import FAMILIES
from bridge.models import DecoderConfig

CONFIG_NAME = "config.json"

# Fields that say how a model is used, stored or displayed, never what it computes.
_NEUTRAL = frozenset(
    """
    _attn_implementation_autoset _name_or_path architectures chunk_size_feed_forward
    do_sample dtype early_stopping id2label label2id length_penalty max_length
    max_new_tokens min_length model_type num_beams num_return_sequences
    output_attentions output_hidden_states problem_type repetition_penalty
    return_dict return_dict_in_generate temperature top_k top_p torch_dtype
    transformers_version typical_p use_cache
    """.split()
)


def from_hf_config(config: Mapping[str, Any] | str | os.PathLike[str]) -> DecoderConfig:
    """Reads a Hugging Face config, of transformers 4 or 5.

    Whatever would change what the model computes, and is not modelled, is refused
    by name; nothing is dropped.

    Args:
      config: The fields, or the path of a `config.json`, or of the directory or the
        weight file beside it.

    Returns:
      The same as a `DecoderConfig`.

    Raises:
      FileNotFoundError: If there is no such file.
      ValueError: If the family is not supported, a field is missing, or one has a
        value that is not modelled. All of them are listed.
    """
    fields = config if isinstance(config, Mapping) else _read_file(Path(config))
    family = _family_of(fields)
    values, wrong = _read_fields(family, fields)
    try:
        values["rope"] = read_rope(fields)
    except ValueError as error:
        wrong.append(str(error))
    if wrong:
        raise ValueError(
            f"This {family.model_type} config cannot be carried over:\n"
            + "\n".join(f"  {line}" for line in wrong)
        )
    return DecoderConfig(model_type=family.model_type, **values)


def to_hf_config(config: DecoderConfig) -> dict[str, Any]:
    """Writes the fields of a Hugging Face config, in old and new spellings.

    `rope_parameters` beside `rope_theta` and `rope_scaling`, `dtype` beside
    `torch_dtype`: transformers 4 and 5 each read theirs.

    Args:
      config: The model.

    Returns:
      Fields ready for JSON.

    Raises:
      ValueError: If the family is not supported.
    """
    family = find_family(config.model_type)
    values = {name: getattr(config, name) for name in family.fields}
    eos = values["eos_token_id"]
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **values,
        **family.fixed,
        **write_rope(config.rope),
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "dtype": config.dtype,
        "torch_dtype": config.dtype,
    }


def find_family(model_type: Any) -> Family:
    """Looks a family up.

    Raises:
      ValueError: If there is none; the supported ones are listed.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not supported; the supported ones are "
            f"{', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[model_type]


def _read_file(path: Path) -> dict[str, Any]:
    if path.is_dir():
        path = path / CONFIG_NAME
    elif path.suffix == ".safetensors":
        path = path.with_name(CONFIG_NAME)
    if not path.is_file():
        raise FileNotFoundError(f"No model config: '{path}' is not there.")
    return parse_json(path.read_bytes(), f"'{path}'")


def _family_of(fields: Mapping[str, Any]) -> Family:
    family = find_family(fields.get("model_type"))
    given = fields.get("architectures") or [family.architecture]
    if family.architecture not in given:
        raise ValueError(
            f"architectures {given} of model_type {family.model_type!r} are not "
            f"supported; the supported one is {family.architecture}."
        )
    return family


def _read_fields(
    family: Family, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Returns the values of `DecoderConfig`, and what is wrong with the fields."""
    values = {
        name: fields.get(name, default) for name, default in family.fields.items()
    }
    wrong = [f"{name} is missing" for name, v in values.items() if v is REQUIRED]
    wrong += [
        f"{name} = {fields[name]!r}: only {modelled!r} is modelled"
        for name, modelled in family.fixed.items()
        if fields.get(name) not in (None, modelled)
    ]
    known = {*family.fields, *family.fixed, *ROPE_NAMES, *_NEUTRAL}
    wrong += [
        f"{name} = {value!r}: this field is not modelled"
        for name, value in fields.items()
        if name not in known and value not in (None, False, [], {}, "")
    ]
    dtypes = {
        str(fields[name]) for name in ("dtype", "torch_dtype") if fields.get(name)
    }
    if len(dtypes) > 1:
        wrong.append(f"dtype and torch_dtype differ: {sorted(dtypes)}")
    values["dtype"] = min(dtypes, default="float32")
    if isinstance(values["eos_token_id"], list):
        values["eos_token_id"] = tuple(values["eos_token_id"])
    return values, wrong
