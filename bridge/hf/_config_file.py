"""The file `config.json` beside the weights of a model."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge._local_path import check_local
from bridge.formats._json import INFINITE, read_json
from bridge.formats._weight_files import (
    TORCH_SUFFIXES,
    holds_model,
    open_checkpoint,
)

CONFIG_NAME = "config.json"
_TIED = "tie_word_embeddings"
_HEAD = "lm_head.weight"
# Parts of the names of heads, quantized or not, by the conventions of all families.
_HEADS = ("lm_head", "embed_out", "output.")
THINKER = "thinker_config"
"""Part of a model that speaks which has the text part."""


def read_config_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the fields of a `config.json`.

    Of a multimodal model, one field may say two things: transformers 4 ties the head
    as `text_config` says, 5 as the fields around it say, and neither ties a head that
    is stored with values of its own. If they differ, the weights beside the file say
    which it is.

    Args:
      path: The file, or the directory or the weight file beside it.

    Raises:
      FileNotFoundError: If there is no such file.
      ValueError: If it is not one JSON object.
    """
    check_local(path)
    path = Path(path)
    file, weights = path, None
    if path.is_dir():
        file, weights = path / CONFIG_NAME, path if holds_model(path) else None
    elif path.suffix in (".safetensors", *TORCH_SUFFIXES):
        file, weights = path.with_name(CONFIG_NAME), path
    if not file.is_file():
        raise FileNotFoundError(f"No model config: '{file}' is not there.")
    fields = read_json(file, f"'{file}'", INFINITE)
    thinker = fields.get(THINKER)
    if weights is None:
        return fields
    if isinstance(thinker, dict):
        return {**fields, THINKER: _settled(thinker, weights, "thinker.")}
    return _settled(fields, weights)


def _settled(fields: dict[str, Any], weights: Path, prefix: str = "") -> dict[str, Any]:
    """Returns fields whose text part says whether a head is stored.

    Where two fields differ, and where there is none: classes around a text part tie by
    default that of which the part's own class does not.
    """
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
        return fields
    said = {fields.get(_TIED), text.get(_TIED)}
    if said == {True, False}:
        keys = open_checkpoint(weights).keys()
        stored = any(k.startswith(prefix) and k.endswith(_HEAD) for k in keys)
        return {**fields, "text_config": {**text, _TIED: not stored}}
    if said == {None} and _has_no_head(weights):
        return {**fields, "text_config": {**text, _TIED: True}}
    return fields


def _has_no_head(weights: Path) -> bool:
    """Returns whether weights can be opened and none has the name of a head."""
    try:
        keys = open_checkpoint(weights).keys()
    except (ValueError, OSError):  # Only the config may be there so far.
        return False
    return not any(name in key for key in keys for name in _HEADS)
