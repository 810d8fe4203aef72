"""The arrays of a step as TensorStore sees them: their metadata, and their shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorstore as ts

_METADATA = "/zarr.json"


def zarr_metadata(directory: Path) -> dict[str, dict[str, Any]]:
    """The `zarr.json` of every array under `directory`, by the name of its leaf."""
    store = ts.KvStore.open(_ocdbt(directory)).result()
    keys = [key.decode() for key in store.list().result()]
    reads = {key: store.read(key) for key in keys if key.endswith(_METADATA)}
    return {
        key.removesuffix(_METADATA): json.loads(read.result().value)
        for key, read in reads.items()
    }


def crop(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Gives arrays that were written padded the shapes named; moves no value.

    What lies behind the end stays in the file, and no reader of zarr sees it.
    """
    context = ts.Context()
    for name, metadata in zarr_metadata(directory).items():
        shape = shapes.get(name)
        if shape is None or shape == tuple(metadata["shape"]):
            continue
        spec = {"driver": "zarr3", "kvstore": _ocdbt(directory) | {"path": f"{name}/"}}
        array = ts.open(spec, context=context).result()
        array.resize(exclusive_max=shape, resize_metadata_only=True).result()


def _ocdbt(directory: Path) -> dict[str, Any]:
    base = {"driver": "file", "path": f"{directory}/"}
    return {"driver": "ocdbt", "base": base}
