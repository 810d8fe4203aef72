"""Files of an edited checkpoint that lie beside its weights."""

import json
import shutil
from collections.abc import Collection
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from bridge.formats._json import INFINITE, read_json
from bridge.formats._weight_files import BIN_INDEX_NAME, INDEX_NAME, TORCH_SUFFIXES
from bridge.streaming._sidecars import check_inside

CONFIG_NAME = "config.json"
_DTYPE_NAMES = ("dtype", "torch_dtype")
_CONFIG_DTYPES = ("float32", "bfloat16", "float16", "float64")


def find_beside(directory: Path) -> list[Path]:
    """Returns paths of files without weights: config, tokenizer, chat templates.

    Checksums are left out, as those of edited weights are others.

    Args:
      directory: Directory of a model; of a file there is nothing beside.

    Returns:
      Paths relative to `directory`, sorted.

    Raises:
      ValueError: As `check_inside` does.
    """
    if not directory.is_dir():
        return []
    listed = [file for file in directory.iterdir() if not file.is_dir()]
    listed += directory.glob("additional_chat_templates/*.jinja")
    found = sorted(
        file
        for file in listed
        if file.suffix not in (".safetensors", *TORCH_SUFFIXES)
        and file.name not in (INDEX_NAME, BIN_INDEX_NAME, "SHA256SUMS")
    )
    check_inside(directory, found)
    return [file.relative_to(directory) for file in found]


def copy_beside(
    source: Path, files: list[Path], destination: Path, dtypes: Collection[np.dtype]
) -> None:
    """Copies files, with the dtype in the config made that of the tensors.

    A config says one dtype. It is left as it is where tensors of floating-point numbers
    have several, or are quantized.

    Args:
      source: Directory of the model.
      files: Files that `find_beside` returns.
      destination: Directory of the edited checkpoint.
      dtypes: Dtypes of the edited tensors; none if no tensor was cast.
    """
    for file in files:
        (destination / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / file, destination / file)
    floating = {dtype.name for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
    config = destination / CONFIG_NAME
    if len(floating) == 1 and floating <= set(_CONFIG_DTYPES) and config.is_file():
        _set_dtype(config, *floating)


def _set_dtype(config: Path, dtype: str) -> None:
    try:
        fields = read_json(config, f"'{config}'", INFINITE)
    except ValueError:  # what is no config before an edit is none after it
        return
    if fields.get("quantization_config"):
        return
    parts = [part for part in fields.values() if isinstance(part, dict)]
    said = [
        (part, name)
        for part in (fields, *parts)
        for name in _DTYPE_NAMES
        if isinstance(part.get(name), str)
    ]
    if {part[name] for part, name in said} <= {dtype}:
        return
    for part, name in said:
        part[name] = dtype
    text = json.dumps(fields, indent=2, ensure_ascii=False)
    config.write_text(text + "\n", encoding="utf-8")
