"""Serialization of a batch to bytes and files, read back without running code."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fsdp_jax._local_path import check_local
from fsdp_jax.rl._batch import Batch
from fsdp_jax.rl._jagged import Jagged

_SAID = "batch.json"
_JSON = str | int | float | bool | None


def save_batch(path: str | os.PathLike[str], batch: Batch) -> None:
    """Writes a batch to a file in numpy's `.npz` format, and replaces an existing one.

    Args:
      path: Path of the file.
      batch: Batch whose objects and meta are JSON values: strings, numbers, bools,
        None, lists, and dicts with string keys.

    Raises:
      ValueError: If objects or meta hold anything else; lists the paths of all such
        values.
    """
    check_local(path)
    # Written aside and renamed, so that readers never see an incomplete file.
    part = Path(f"{path}.part")
    part.write_bytes(to_bytes(batch))
    part.replace(path)


def load_batch(path: str | os.PathLike[str]) -> Batch:
    """Reads a file of `save_batch`; arrays are numpy's.

    Raises:
      ValueError: If the file is not one of `save_batch`.
    """
    check_local(path)
    try:
        return from_bytes(Path(path).read_bytes())
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"'{path}' was not written by save_batch: {error}") from error


def to_bytes(batch: Batch) -> bytes:
    """Serializes a batch to the bytes of its file."""
    arrays, columns = {}, []
    for name, column in batch.arrays.items():
        parts = [column.values, column.lengths] if _is_jagged(column) else [column]
        dtypes = [np.asarray(part).dtype.name for part in parts]
        columns.append({"name": name, "dtypes": dtypes, "first": len(arrays)})
        for part in parts:
            arrays[str(len(arrays))] = _as_plain(np.asarray(part))
    objects = {name: column.tolist() for name, column in batch.objects.items()}
    said = {"columns": columns, "objects": objects, "meta": dict(batch.meta)}
    if wrong := _not_json({"objects": objects, "meta": said["meta"]}, ""):
        raise ValueError(
            "A batch can be sent only with values that JSON can hold, other than "
            f"{', '.join(wrong)}."
        )
    arrays[_SAID] = np.frombuffer(json.dumps(said).encode(), np.uint8)
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def from_bytes(data: bytes) -> Batch:
    """Deserializes the bytes of `to_bytes`."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        said = json.loads(file[_SAID].tobytes())
        arrays = {}
        for column in said["columns"]:
            parts = [
                file[str(column["first"] + i)].view(jnp.dtype(dtype))
                for i, dtype in enumerate(column["dtypes"])
            ]
            arrays[column["name"]] = Jagged(*parts) if len(parts) > 1 else parts[0]
        return Batch(arrays, said["objects"], said["meta"])


def _is_jagged(column: Any) -> bool:
    return isinstance(column, Jagged)


def _as_plain(array: np.ndarray) -> np.ndarray:
    """Views ml_dtypes as unsigned integers of their size: `.npz` has no such types."""
    known = array.dtype.kind in "biufc"
    return array if known else array.view(f"u{array.dtype.itemsize}")


def _not_json(value: Any, path: str) -> list[str]:
    """Returns the paths of values that JSON would refuse or not preserve."""
    if isinstance(value, list):
        return [
            p for i, each in enumerate(value) for p in _not_json(each, f"{path}[{i}]")
        ]
    if isinstance(value, dict):
        keys = [f"{path}: key {key!r}" for key in value if not isinstance(key, str)]
        dotted = f"{path}." if path else ""
        return keys + [p for k in value for p in _not_json(value[k], f"{dotted}{k}")]
    return [] if isinstance(value, _JSON) else [f"{path} ({type(value).__name__})"]
