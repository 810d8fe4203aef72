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
      batch: Batch whose arrays are of numbers, bools or times, and whose objects and
        meta are JSON values: strings, numbers, bools, None, lists, and dicts with
        string keys.

    Raises:
      ValueError: If arrays, objects or meta hold anything else; lists the paths of all
        such values.
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
    """Serializes a batch to the bytes of its file.

    Raises:
      ValueError: As `save_batch` does.
    """
    if wrong := [
        f"{name} ({dtype})"
        for name, column in batch.arrays.items()
        if not _is_kept(dtype := _dtype_of(column))
    ]:
        raise ValueError(
            "A batch can be stored or sent only with arrays of numbers, bools or "
            "times, other than "
            f"{', '.join(wrong)}. Put strings into `objects`, and random keys as "
            "jax.random.key_data(key)."
        )
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


def _dtype_of(column: Any) -> Any:
    values = column.values if _is_jagged(column) else column
    return values.dtype if hasattr(values, "dtype") else np.asarray(values).dtype


def _is_kept(dtype: Any) -> bool:
    """Returns whether an array's dtype is one that its name stands for."""
    try:
        return dtype.kind != "O" and jnp.dtype(dtype.name) == dtype.newbyteorder("=")
    except (AttributeError, TypeError):  # of random keys, strings and records
        return False


def _as_plain(array: np.ndarray) -> np.ndarray:
    """Views ml_dtypes as unsigned integers of their size: `.npz` has no such types."""
    # In this machine's order of bytes, since only the name of a dtype is kept.
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
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
