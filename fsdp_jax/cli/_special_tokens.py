"""Special tokens of a model: those that its template names, and those that end text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.models import DecoderConfig
from fsdp_jax.cli._errors import require
from fsdp_jax.cli._tokenizer import TextCodec

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is no file.

    Args:
      file: File.
    """
    return json.loads(file.read_text()) if file.is_file() else {}


def special_tokens(directory: Path) -> dict[str, str | None]:
    """Returns the special tokens that a tokenizer's files name, e.g. `eos_token`.

    Args:
      directory: Directory of the model's files.

    Returns:
      Text by name; None for one that a file says there is not.
    """
    listed = read_json(directory / "special_tokens_map.json")
    listed |= read_json(directory / "tokenizer_config.json")
    return {name: _content(listed[name]) for name in _NAMES if name in listed}


def tokens_of_template(directory: Path, source: str) -> dict[str, str]:
    """Returns the special tokens that a template may name.

    A name that no file has is that of the tokenizer's class, which transformers knows:
    a template would render nothing in its place.

    Args:
      directory: Directory of the model's files.
      source: Jinja source.

    Raises:
      ValueError: If the template names a token that is not to be found.
    """
    found = special_tokens(directory)
    if unknown := [name for name in _NAMES if name in source and name not in found]:
        found |= _of_class(directory, unknown)
    return {name: text for name, text in found.items() if text is not None}


def _of_class(directory: Path, names: list[str]) -> dict[str, str | None]:
    transformers = require("transformers", "a chat template")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    except Exception as error:  # Any, since a tokenizer's class may be anything.
        raise ValueError(
            f"The chat template of '{directory}' names {', '.join(names)}, which "
            "neither tokenizer_config.json nor special_tokens_map.json has, and "
            f"transformers cannot read the tokenizer: {error}. Add them to "
            "tokenizer_config.json, null for none."
        ) from error
    known = tokenizer.special_tokens_map
    return {name: known.get(name) for name in names}


def end_token(
    codec: TextCodec, directory: Path | None, config: DecoderConfig
) -> int | None:
    """Returns the token that is put behind a text that no template has ended.

    It is the `eos_token` of the tokenizer, as TRL has it, and if that has none the
    first of the model's config.

    Args:
      codec: Tokenizer.
      directory: Directory of the model's files; None if there is none.
      config: Config of the model.
    """
    if (token := _own_end(codec, directory)) is not None:
        return token
    return next(iter(_listed(config.eos_token_id)), None)


def stop_tokens(
    codec: TextCodec, directory: Path | None, config: DecoderConfig
) -> tuple[int, ...]:
    """Returns the tokens that end what a model writes: none, one, or several.

    Args:
      codec: Tokenizer.
      directory: Directory of the model's files; None if there is none.
      config: Config of the model.
    """
    generation: Mapping[str, Any] = {}
    if directory is not None:
        generation = read_json(directory / "generation_config.json")
    found = [*_listed(config.eos_token_id), *_listed(generation.get("eos_token_id"))]
    if (token := _own_end(codec, directory)) is not None:
        found.append(token)
    return tuple(dict.fromkeys(found))


def _own_end(codec: TextCodec, directory: Path | None) -> int | None:
    text = None if directory is None else special_tokens(directory).get("eos_token")
    return None if text is None else codec.id_of(text)


def _listed(ends: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    if ends is None:
        return ()
    return (ends,) if isinstance(ends, int) else tuple(ends)


def _content(token: Any) -> str | None:
    """Returns the text of a token, which may be described by an object."""
    return token.get("content") if isinstance(token, dict) else token
