"""Config files of Hugging Face, to and from `DecoderConfig`."""

import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import Any

from bridge.families import FAMILIES, NAMES
from bridge.families._family import REQUIRED, Family
from bridge.families._field_transform import FieldTransform
from bridge.families.releases import RELEASES
from bridge.formats.quantized._decode import undecoded
from bridge.hf._config_file import read_config_file
from bridge.hf._text_part import text_fields
from bridge.hf._unread import (
    TRUE,
    is_dropout,
    not_ignorable,
    sort_unread,
    without_rope_extras,
)
from bridge.models import (
    AltUpConfig,
    AttentionExpertsConfig,
    BlockIndexerConfig,
    CompressedAttentionConfig,
    DecoderConfig,
    DeltaNetConfig,
    FullAttentionConfig,
    HeadTransformConfig,
    HyperConnectionsConfig,
    IndexerConfig,
    KVSharingConfig,
    LightningConfig,
    Mamba1Config,
    MambaConfig,
    MLAConfig,
    MoEConfig,
    MultipliersConfig,
    PerLayerInputConfig,
    ResidualFactorsConfig,
    RGLRUConfig,
    SharedBlocksConfig,
    ShortConvConfig,
)
from bridge.models._config_consistency import MAX_LAYERS

_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_PARTS = {
    "moe": MoEConfig,
    "mla": MLAConfig,
    "indexer": IndexerConfig,
    "block_indexer": BlockIndexerConfig,
    "compressed_attention": CompressedAttentionConfig,
    "attention_experts": AttentionExpertsConfig,
    "hyper_connections": HyperConnectionsConfig,
    "full_attention": FullAttentionConfig,
    "head_transform": HeadTransformConfig,
    "kv_sharing": KVSharingConfig,
    "per_layer_input": PerLayerInputConfig,
    "altup": AltUpConfig,
    "short_conv": ShortConvConfig,
    "delta_net": DeltaNetConfig,
    "lightning": LightningConfig,
    "residual_factors": ResidualFactorsConfig,
    "mamba": MambaConfig,
    "mamba1": Mamba1Config,
    "rg_lru": RGLRUConfig,
    "shared_blocks": SharedBlocksConfig,
    "multipliers": MultipliersConfig,
}


def from_hf_config(
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    ignore_fields: Collection[str] = (),
) -> DecoderConfig:
    """Reads a Hugging Face config, of transformers 4 or 5.

    Whatever would change what the model computes, and is not modelled, is refused by
    name. A field that transformers' own model of the family never reads changes
    nothing: it is left out, and `left_out_fields` returns it. Where `auto_map` names
    remote code, such a field may be read by that code, and is refused too. Of a
    multimodal config, the text part is read.

    Args:
      config: Fields, or path of a `config.json`, of its directory or of a weight file
        beside it.
      ignore_fields: Names of fields to leave out that would be refused. Fields that
        are read cannot be left out.

    Returns:
      Config of the decoder.

    Raises:
      FileNotFoundError: If there is no such file.
      ValueError: If the family is not supported, a field is missing, or one has a
        value that is not modelled, or `ignore_fields` names one that is read. All of
        them are listed.

    Examples:
      >>> config = bridge.from_hf_config("small-llama")
      >>> config.hidden_size, config.rope.rope_theta
      (16, 10000.0)
    """
    family, fields = _open_fields(config)
    wrong = not_ignorable(family, ignore_fields)
    wrong += sort_unread(family, fields, ignore_fields)[1]
    fields, differing = _rename(family, without_rope_extras(fields))
    values, unread = _read_fields(family, fields)
    wrong = [*differing, *unread, *_unmodelled(family, fields), *wrong]
    values["dtype"] = _read_dtype(fields, wrong)
    values["passthrough"] = tuple(
        (name, _freeze(fields.get(name, default)))
        for name, default in family.passthrough.items()
    )
    if not wrong:
        try:
            return build_config(family, values)
        except ValueError as error:
            wrong = str(error).splitlines()
    raise ValueError(
        f"This {family.model_type} config cannot be converted:\n"
        + "\n".join(f"  {line}" for line in wrong)
    )


def left_out_fields(
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    ignore_fields: Collection[str] = (),
) -> dict[str, Any]:
    """Returns what `from_hf_config` leaves out of a config, as it changes no number.

    Args:
      config: Config, as `from_hf_config` takes it.
      ignore_fields: Names of fields to ignore, as `from_hf_config` takes them.

    Returns:
      Values by the names of the fields; those that are null, false or empty are not
      listed, and neither is what says how a model is stored, displayed or sampled.

    Raises:
      FileNotFoundError: If there is no such file.
      ValueError: If the family is not supported, or `ignore_fields` names a field that
        is read.

    Examples:
      >>> bridge.left_out_fields({"model_type": "gpt_oss", "unsloth_fixed": True})
      {'unsloth_fixed': True}
    """
    family, fields = _open_fields(config)
    if wrong := not_ignorable(family, ignore_fields):
        raise ValueError("\n".join(wrong))
    return sort_unread(family, fields, ignore_fields)[0]


def to_hf_config(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields of a Hugging Face config, for transformers 4 and 5.

    Fields that the two versions name differently are written under both names:
    `rope_parameters` beside `rope_theta` and `rope_scaling`, `dtype` beside
    `torch_dtype`.

    Args:
      config: Config of the decoder.

    Returns:
      Values of the fields, which `json.dump` takes.

    Raises:
      ValueError: If the family is not supported, or its config files cannot say what
        this config says.

    Examples:
      >>> fields = bridge.to_hf_config(config)
      >>> fields["architectures"], fields["num_hidden_layers"]
      (['LlamaForCausalLM'], 2)
    """
    family = find_family(config.model_type)
    _check_parts(family, config)
    fields = {
        name: getter(config, field.targets(name)[0])
        for name, field in family.fields.items()
    }
    fields |= {**family.fixed, **dict(config.passthrough), **family.left_out}
    for transform in family.transforms:
        fields |= transform.write(config)
    fields = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{name: _thaw(value) for name, value in fields.items()},
        "dtype": config.dtype,
        "torch_dtype": config.dtype,
    }
    _check_said(config, fields)
    return fields


def find_family(model_type: Any) -> Family:
    """Looks a family up.

    Raises:
      ValueError: If there is none; the supported ones are listed.
    """
    if not isinstance(model_type, str) or (name := NAMES.get(model_type)) is None:
        raise ValueError(
            f"model_type {model_type!r} is not supported; the supported ones are "
            f"{', '.join(sorted([*NAMES, *RELEASES]))}."
        )
    return FAMILIES[name]


def getter(config: Any, name: str) -> Any:
    """Returns a value of a config by its dotted name."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def build_config(family: Family, values: Mapping[str, Any]) -> DecoderConfig:
    """Builds a config of values by dotted name, each in the part that it begins with.

    Raises:
      ValueError: If a value cannot be, or values do not fit.
    """
    nested: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    flat = {}
    for name, value in values.items():
        part, _, rest = name.rpartition(".")
        (nested[part] if part else flat)[rest] = value
    parts = {part: _PARTS[part](**given) for part, given in nested.items() if given}
    model_type = family.written_as or family.model_type
    return DecoderConfig(model_type=model_type, **flat, **parts)


def _family_of(fields: Mapping[str, Any]) -> Family:
    model_type = fields.get("model_type")
    release = RELEASES.get(model_type) if isinstance(model_type, str) else None
    family = release or find_family(model_type)
    base = family.architecture.replace("ForCausalLM", "Model")
    base = base.replace("LMHeadModel", "Model")  # GPT-2's
    given = fields.get("architectures") or [family.architecture]
    known = {family.architecture, base, *family.also_architectures}
    if not isinstance(given, list | tuple) or not known.intersection(map(str, given)):
        raise ValueError(
            f"architectures {given} of model_type {family.model_type!r} are not "
            f"supported; the supported one is {family.architecture}."
        )
    return family


def _open_fields(
    config: Mapping[str, Any] | str | os.PathLike[str],
) -> tuple[Family, Mapping[str, Any]]:
    fields = config if isinstance(config, Mapping) else read_config_file(config)
    fields = text_fields(fields)
    return _family_of(fields), fields


def _rename(
    family: Family, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Gives fields the names that they are written by, and says which differ."""
    renamed, wrong = dict(fields), []
    names = {a: name for name, f in family.fields.items() for a in f.aliases}
    for alias, name in {**names, **family.aliases}.items():
        value = renamed.pop(alias, None)
        if value is not None and renamed.setdefault(name, value) != value:
            wrong.append(f"{name} = {renamed[name]!r}, but {alias} = {value!r}")
    return renamed, wrong


def _read_fields(
    family: Family, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Returns values by our dotted names, and what is wrong with the fields."""
    filled = {
        name: fields.get(name, field.default) for name, field in family.fields.items()
    }
    wrong = [f"{name} is missing" for name, v in filled.items() if v is REQUIRED]
    values = dict(family.constants)
    for name, field in family.fields.items():
        values |= dict.fromkeys(field.targets(name), _freeze(filled[name]))
    counts = [filled.get(name, fields.get(name)) for name in _LAYER_COUNTS]
    counts.append(values.get("num_hidden_layers"))  # of any name in the file
    layers = max((n for n in counts if isinstance(n, int)), default=0)
    if layers > MAX_LAYERS:  # before any list of so many
        return values, [f"num_hidden_layers {layers:,}: at most {MAX_LAYERS:,}"]
    defaults = {
        k: v for transform in family.transforms for k, v in transform.defaults.items()
    }
    known = {name: v for name, v in filled.items() if v is not REQUIRED}
    given = {**family.passthrough, **defaults, **fields, **known}
    for transform in family.transforms:
        read, unread = _decode(transform, given)
        values |= read
        wrong += [line for line in unread if line not in wrong]
    return values, wrong


def _decode(
    transform: FieldTransform, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Returns what a transform reads, and what it says is wrong with the fields."""
    try:
        return transform.read(fields), []
    except ValueError as error:
        return {}, str(error).splitlines()
    except KeyError as error:
        return {}, [f"{error.args[0]} is missing"]
    except (TypeError, AttributeError, ArithmeticError) as error:
        names = ", ".join(transform.names)
        return {}, [f"{names}, or a size: wrong type or value: {error}"]


def _unmodelled(family: Family, fields: Mapping[str, Any]) -> list[str]:
    wrong = [
        f"{name} = {fields[name]!r}: only {modelled!r} is modelled"
        for name, modelled in family.fixed.items()
        if fields.get(name) not in (None, modelled) and not is_dropout(name)
    ]
    wrong += [
        f"{name} = {fields[name]!r}: only True is modelled"
        for name in TRUE
        if fields.get(name, True) is not True
    ]
    return wrong + undecoded(fields.get("quantization_config"))


def _read_dtype(fields: Mapping[str, Any], wrong: list[str]) -> str:
    dtypes = {
        str(fields[name]) for name in ("dtype", "torch_dtype") if fields.get(name)
    }
    if len(dtypes) > 1:
        wrong.append(f"dtype and torch_dtype differ: {sorted(dtypes)}")
    wrong += [
        f"dtype = {dtype!r}: none of {', '.join(_DTYPES)}"
        for dtype in sorted(dtypes)
        if dtype not in _DTYPES
    ]
    return min(dtypes, default="float32")


def _check_parts(family: Family, config: DecoderConfig) -> None:
    """Refuses a config with a part that the family lacks, or without one it has."""
    targets = {t for name, field in family.fields.items() for t in field.targets(name)}
    has = {part: any(t.startswith(f"{part}.") for t in targets) for part in _PARTS}
    has["rope"] = "rope" not in family.constants
    wrong = [
        f"  {part} = {getattr(config, part)!r}: all its models have one"
        if needed
        else f"  {part} = {getattr(config, part)!r}: none of its models has one"
        for part, needed in has.items()
        if needed != (getattr(config, part) is not None)
        if part not in family.optional
    ]
    if wrong:
        raise ValueError(
            f"A {config.model_type} config file cannot express:\n" + "\n".join(wrong)
        )


def _check_said(config: DecoderConfig, fields: dict[str, Any]) -> None:
    """Refuses a config that its family's files cannot express: a changed constant."""
    again, family = from_hf_config(fields), find_family(config.model_type)
    passthrough = {**dict(config.passthrough), **family.left_out}
    config = dataclasses.replace(config, passthrough=tuple(passthrough.items()))
    if again != config:
        names = [
            f"  {name} = {getattr(config, name)!r}: would be read as {value!r}"
            for name, value in vars(again).items()
            if value != getattr(config, name)
        ]
        raise ValueError(
            f"A {config.model_type} config file cannot express:\n" + "\n".join(names)
        )


def _freeze(value: Any) -> Any:
    """Makes lists tuples, so that a config can be hashed and compared."""
    if isinstance(value, list | tuple):
        return tuple(map(_freeze, value))
    if isinstance(value, dict):
        return tuple((key, _freeze(v)) for key, v in value.items())
    return value


def _thaw(value: Any) -> Any:
    return list(map(_thaw, value)) if isinstance(value, tuple) else value
