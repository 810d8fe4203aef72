"""Files in a local step, stored as checksummed shards.

So a host that was lost gets them from its peer too, and bit flips are detected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from fsdp_jax.checkpoint._assets import FOLDER, Files, find_files
from fsdp_jax.checkpoint._leaf_names import Leaf
from fsdp_jax.checkpoint.local._format import ShardFile

_PREFIX = f"{FOLDER}/"


def read_files(files: Mapping[str, Files]) -> dict[str, Leaf]:
    """Reads the content of each file as a leaf, whole in each process.

    Raises:
      ValueError: If a path or a name is not usable, as in `find_files`.
    """
    contents = {
        name: np.frombuffer(path.read_bytes(), np.uint8)
        for name, path in find_files(files).items()
    }
    return {name: Leaf(content, content.shape) for name, content in contents.items()}


def is_file(leaf: str) -> bool:
    """Returns whether a leaf of a local step is the content of a file."""
    return leaf.startswith(_PREFIX)


def names_of(leaves: Iterable[str]) -> list[str]:
    """Returns the names under which a local step has files."""
    return sorted({leaf.split("/")[1] for leaf in leaves if is_file(leaf)})


def write_files(shards: ShardFile, folder: Path) -> None:
    """Writes the files of a step that are not in its folder yet.

    Args:
      shards: Verified file of any process of the step.
      folder: Folder of the step.
    """
    for (name, _), content in shards.read().items():
        path = folder / name
        if is_file(name) and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.part")
            part.write_bytes(content.data)
            part.replace(path)
