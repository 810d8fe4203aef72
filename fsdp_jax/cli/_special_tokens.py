"""Special tokens of a model: those that its template names, and those that end text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.models import DecoderConfig
from fsdp_jax.cli._tokenizer import Bytes, TextCodec

# Classes without special tokens of their own.
_WITHOUT_TOKENS = ("PreTrainedTokenizerFast", "TokenizersBackend")
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is no file.

    Args:
      file: File.

    Raises:
      ValueError: If it holds something else.
    """
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are some.
        raise ValueError(f"'{file}' is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"'{file}' holds a {type(found).__name__}, and no object.")
    return found


def special_tokens(directory: Path) -> dict[str, str | None]:
    """Returns the special tokens that a tokenizer's files name, e.g. `eos_token`.

    Args:
      directory: Directory of the model's files.

    Returns:
      Text by name; None for a token that a file sets to null.

    Source: transformers `PreTrainedTokenizerBase._from_pretrained`, which reads
      `special_tokens_map.json` where the other file does not list its added tokens.
    """
    listed = read_json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in listed:
        listed |= read_json(directory / "special_tokens_map.json")
    return {name: _content(listed[name]) for name in _NAMES if name in listed}


def tokens_of_template(directory: Path, source: str) -> dict[str, str]:
    """Returns the special tokens that a template may name.

    Args:
      directory: Directory of the model's files.
      source: Jinja source.

    Raises:
      ValueError: If the template names a token that no file has and that may be one of
        the tokenizer's class: it would be rendered as nothing.
    """
    found = special_tokens(directory)
    config = read_json(directory / "tokenizer_config.json")
    missing = [
        name
        for name in _NAMES
        if name not in found and re.search(rf"\b{name}\b", source)
    ]
    if missing and config.get("tokenizer_class") not in _WITHOUT_TOKENS:
        raise ValueError(
            f"The chat template of '{directory}' names {', '.join(missing)}, which "
            "neither tokenizer_config.json nor special_tokens_map.json has. Add them "
            "to tokenizer_config.json, null for none."
        )
    return {name: text for name, text in found.items() if text is not None}


def end_token(
    codec: TextCodec, directory: Path | None, config: DecoderConfig
) -> int | None:
    """Returns the token that is put behind a text that no template has ended.

    It is the `eos_token` of the tokenizer's files, as TRL has it, and if they have none
    the first of the model's config.

    Args:
      codec: Tokenizer.
      directory: Directory of the model's files; None if there is none.
      config: Config of the model.

    Raises:
      ValueError: If the tokenizer has no such token.
    """
    if (token := _own_end(codec, directory)) is not None:
        return token
    return next(iter(_as_tuple(config.eos_token_id)), None)


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
    found = [
        *_as_tuple(config.eos_token_id),
        *_as_tuple(generation.get("eos_token_id")),
    ]
    if (token := _own_end(codec, directory)) is not None:
        found.append(token)
    return tuple(dict.fromkeys(found))


def _own_end(codec: TextCodec, directory: Path | None) -> int | None:
    text = None if directory is None else special_tokens(directory).get("eos_token")
    if text is None or isinstance(codec, Bytes):
        return None
    if (found := codec.id_of(text)) is None:
        raise ValueError(
            f"The eos_token {text!r} of '{directory}' is no token of its "
            "tokenizer.json: correct it in tokenizer_config.json."
        )
    return found


def _as_tuple(ends: int | Sequence[int | None] | None) -> tuple[int, ...]:
    listed = [ends] if ends is None or isinstance(ends, int) else ends
    return tuple(end for end in listed if end is not None)


def _content(token: Any) -> str | None:
    """Returns the text of a token, which may be described by an object."""
    return token.get("content") if isinstance(token, dict) else token
