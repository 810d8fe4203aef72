"""Fields of a config file that are not read: left out, or refused.

A list of harmless names would always lag behind what is published. So the rule is what
transformers does: a field that neither its config class nor its model takes from the
file changes no number, and is left out. One that it knows and that is not modelled
here is refused, and so is one that only remote code (`auto_map`) could read.
"""

from collections.abc import Collection, Mapping
from typing import Any

from bridge.families._family import Family
from bridge.families._transformers_fields import BY_MODEL_TYPE, COMMON, ROPE_KEYS

# Fields that say how a model is used, stored or displayed, never what it computes:
# which kernel computes attention or experts, heads of other tasks, how tokens are
# drawn, whether training keeps activations, how transformers 4 slices its products.
# transformers 4 writes all of its base class into any file of remote code.
NEUTRAL = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash
    _experts_implementation _name_or_path _sliding_window_pattern architectures
    attn_implementation auto_map bad_words_ids begin_suppress_tokens
    chunk_size_feed_forward classifier_dropout diversity_penalty do_sample dtype
    early_stopping encoder_no_repeat_ngram_size experts_implementation
    exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing id2label label2id length_penalty
    max_length max_new_tokens min_length model_type no_repeat_ngram_size
    num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_scores prefix pretraining_tp problem_type
    quantization_config remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p use_bfloat16 use_cache
    """.split()
)
TRUE = ("is_causal",)
"""What transformers takes for true in every family where the file does not say."""

_READ_OF_ALL = frozenset(
    {"architectures", "auto_map", "dtype", "model_type", "quantization_config"}
    | {"torch_dtype", *TRUE}
)
_ROPES = ("rope_scaling", "rope_parameters")
_POSITIONS = frozenset({*_ROPES, "rope_theta", "partial_rotary_factor"})
_OFF = (None, False, [], {}, "")
# What `auto_map` may name beside the code of a model.
_NO_MODEL = frozenset(
    f"Auto{kind}"
    for kind in ("FeatureExtractor", "ImageProcessor", "Processor", "Tokenizer")
)


def sort_unread(
    family: Family, fields: Mapping[str, Any], ignore_fields: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Sorts the fields that a family's rules do not read.

    Args:
      family: The family of the file.
      fields: All fields of the file.
      ignore_fields: Names that the caller says change nothing.

    Returns:
      The fields that are left out, and a line for each that is refused. Keys of a
      rope are fields too: `rope_scaling.attn_factor`.
    """
    known = read_names(family) | NEUTRAL
    unread = {
        name: value
        for name, value in {**fields, **_rope_extras(fields)}.items()
        if name not in known and value not in _OFF
    }
    remote = remote_code(fields.get("auto_map"))
    refused = {
        name: line
        for name, value in unread.items()
        if name not in ignore_fields and not _is_inert(family, name, value)
        if (line := _refusal(family, name, value, remote))
    }
    dropped = {n: fields[n] for n in family.fixed if is_dropout(n) and fields.get(n)}
    left_out = {name: v for name, v in unread.items() if name not in refused}
    left_out |= dropped
    return left_out, list(refused.values())


def without_rope_extras(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields, their ropes without keys that transformers does not know."""
    extras = _rope_extras(fields)
    ropes = {
        name: {k: v for k, v in fields[name].items() if f"{name}.{k}" not in extras}
        for name in _ROPES
        if isinstance(fields.get(name), Mapping)
    }
    return {**fields, **ropes}


def read_names(family: Family) -> frozenset[str]:
    """Returns the fields that are read of a family's files, by any of their names."""
    return _READ_OF_ALL.union(
        family.fields,
        family.fixed,
        family.passthrough,
        family.aliases,
        *(field.aliases for field in family.fields.values()),
        *(transform.names for transform in family.transforms),
    )


def not_turned(family: Family) -> frozenset[str]:
    """Returns the fields of a rope, if the family's attention has no rope.

    transformers reads them of every config, and turns nothing in such a model.
    """
    has_none = family.constants.get("rope", ...) is None
    return _POSITIONS if has_none else frozenset()


def not_ignorable(family: Family, ignore_fields: Collection[str]) -> list[str]:
    """Returns a line for each name that is read, and so cannot be ignored.

    Raises:
      ValueError: If the names are one string, which would be its letters.
    """
    if isinstance(ignore_fields, str):
        raise ValueError(
            f"ignore_fields = {ignore_fields!r} is one string; write "
            f"ignore_fields=({ignore_fields!r},)."
        )
    return [
        f"ignore_fields has {name}: {family.model_type} configs are read by this field"
        for name in sorted(read_names(family).intersection(ignore_fields))
    ]


def is_dropout(name: str) -> bool:
    """Returns whether a field is a rate of dropout, which training alone would use."""
    return name.endswith(("_dropout", "_pdrop"))


def remote_code(auto_map: Any) -> list[str]:
    """Returns the entries of `auto_map` that name the code of a config or a model."""
    if not isinstance(auto_map, Mapping):
        return [repr(auto_map)] if auto_map else []
    return sorted(str(auto_map[name]) for name in auto_map if name not in _NO_MODEL)


def _rope_extras(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name in _ROPES
        if isinstance(rope := fields.get(name), Mapping)
        for key, value in rope.items()
        if key not in ROPE_KEYS and not isinstance(value, Mapping)
    }


def _is_inert(family: Family, name: str, value: Any) -> bool:
    if name in family.unread:
        return True
    return name in family.inert and family.inert[name] == value


def _is_plain(value: Any) -> bool:
    """Returns whether a field of a rope says nothing but its base and its share.

    transformers completes the fields of other ropes from those of the config, and fails
    where a config without a rope has none.
    """
    if not isinstance(value, Mapping):
        return True
    return value.get("rope_type", value.get("type", "default")) == "default"


def _refusal(family: Family, name: str, value: Any, remote: list[str]) -> str | None:
    said = f"{name} = {value!r}: this field is not modelled"
    if name.split(".")[0] in not_turned(family) and _is_plain(value):
        return None
    if family.written_as is not None:
        return (
            f"{said}, and code of {family.model_type} may read it; if it changes no "
            f"number, pass {_ignoring(name)}"
        )
    if name in COMMON | BY_MODEL_TYPE[family.model_type]:
        return f"{said}, and transformers reads it"
    if remote:
        return (
            f"{said}, and the code that auto_map names ({', '.join(remote)}) may read "
            f"it; if it changes no number, pass {_ignoring(name)}"
        )
    return None


def _ignoring(name: str) -> str:
    return f"ignore_fields=({name!r},), or --ignore-field {name} to a command"
