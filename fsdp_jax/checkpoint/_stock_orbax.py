"""Checkpoints that Orbax wrote for other programs: where they are, and their names."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import tensorstore as ts

from fsdp_jax.checkpoint._paths import as_path, files_in, kvstore_spec
from fsdp_jax.checkpoint._zarr import Arrays, open_arrays

Rules = Sequence[tuple[str, str]]
"""Pattern and replacement of `re.sub` for each, applied to names in order."""

# Files of a folder with arrays: of Orbax's database, and of its description.
_OF_AN_ITEM = ("manifest.ocdbt", "_METADATA")
# Names of a step's folder: `7`, and `checkpoint_7` or `step_00007`.
_STEP = re.compile(r"(?:.*_)?(\d+)")
# Key of an array's metadata, by zarr's version.
_METADATA = {".zarray": "zarr", "zarr.json": "zarr3"}


@dataclasses.dataclass(frozen=True)
class StockArrays:
    """Arrays of a stock checkpoint under their new names.

    Attributes:
      directory: Folder of the arrays.
      arrays: Where they are.
      leaves: Shape and dtype, by new name.
    """

    directory: Any
    arrays: Arrays
    leaves: dict[str, jax.ShapeDtypeStruct]

    @property
    def max_bytes(self) -> int:
        """Bytes of the largest array, which no chunk of any exceeds."""
        return max(x.size * x.dtype.itemsize for x in self.leaves.values())


def find_arrays(path: str | os.PathLike[str], step: Any, rules: Rules) -> StockArrays:
    """Finds the arrays of a stock checkpoint, and renames them.

    Args:
      path: Folder of arrays, of a step, or of several steps.
      step: Number of the step; None for the newest.
      rules: Rules for names; an array whose name becomes empty is left out.

    Raises:
      ValueError: If there is no such checkpoint, or two arrays get one name.
    """
    rules = _checked(rules)
    directory = _find_item(path, step)
    kvstore, driver, stored = _list_arrays(directory)
    if not stored:
        raise ValueError(f"'{directory}' holds no arrays that Orbax wrote.")
    keys = _renamed(directory, stored, rules)
    arrays = Arrays(kvstore, driver, keys)
    leaves = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype.numpy_dtype)
        for name, array in open_arrays(arrays, list(keys)).items()
    }
    return StockArrays(directory, arrays, leaves)


def _checked(rules: Any) -> Rules:
    """Returns rules as a tuple of pairs of strings; refuses what is none."""
    pairs = tuple(rules) if isinstance(rules, Iterable) else (rules,)
    wrong = [
        pair
        for pair in pairs
        if not isinstance(pair, tuple | list)
        or len(pair) != 2
        or not all(isinstance(part, str) for part in pair)
    ]
    if wrong or isinstance(rules, Mapping | str):
        raise ValueError(
            f"rules={rules!r}: a sequence of pairs of a pattern and its replacement, "
            "such as [(r'^model', 'params')]."
        )
    return pairs


def _find_item(path: str | os.PathLike[str], step: Any) -> Any:
    """Returns the folder with the arrays."""
    directory = as_path(path).absolute()
    if not directory.is_dir():
        raise ValueError(f"No checkpoint at '{path}': there is no such directory.")
    if _is_item(directory):
        if step is not None:
            raise ValueError(f"'{path}' is one checkpoint, and has no step {step}.")
        return directory
    steps = _steps(directory)
    if steps:
        if step is not None and step not in steps:
            held = ", ".join(map(str, sorted(steps)))
            raise ValueError(f"No step {step!r} in '{path}', which holds {held}.")
        directory = steps[max(steps) if step is None else step]
    return directory if _is_item(directory) else _only_item(directory)


def _only_item(directory: Any) -> Any:
    """Returns the one folder with arrays in the folder of a step."""
    items = [child for child in directory.iterdir() if _is_item(child)]
    if len(items) != 1:
        names = ", ".join(sorted(item.name for item in items)) or "none"
        raise ValueError(
            f"'{directory}' holds {len(items)} folders with arrays that Orbax wrote: "
            f"{names}. Give the path of one."
        )
    return items[0]


def _is_item(directory: Any) -> bool:
    return any((directory / name).is_file() for name in _OF_AN_ITEM)


def _steps(directory: Any) -> dict[int, Any]:
    """Returns the folder of each step, by number."""
    found = {child: _STEP.fullmatch(child.name) for child in directory.iterdir()}
    return {int(match[1]): child for child, match in found.items() if match}


def _list_arrays(directory: Any) -> tuple[dict[str, Any], str, list[str]]:
    """Returns the key-value store, zarr's driver, and the names of all arrays."""
    kvstore = kvstore_spec(directory)
    if (directory / _OF_AN_ITEM[0]).is_file():
        kvstore = {"driver": "ocdbt", "base": kvstore}
        opened = ts.KvStore.open(kvstore).result()
        keys = [key.decode() for key in opened.list().result()]
    else:
        keys = files_in(directory)
    for file, driver in _METADATA.items():
        ends = [key for key in keys if key.endswith(f"/{file}")]
        if ends:
            return kvstore, driver, [key.removesuffix(f"/{file}") for key in ends]
    return kvstore, "zarr3", []


def _renamed(directory: Any, stored: list[str], rules: Rules) -> dict[str, str]:
    """Returns the stored name of each array by its new name."""
    keys: dict[str, str] = {}
    problems = []
    for old in stored:
        new = _after(old, rules)
        if new in keys:
            problems.append(f"{keys[new]} and {old} both become {new}")
        elif new:
            keys[new] = old
    unused = [
        pattern
        for number, (pattern, _) in enumerate(rules)
        if not any(re.search(pattern, _after(old, rules[:number])) for old in stored)
    ]
    problems += [f"no array is called {pattern!r}" for pattern in unused]
    if problems:
        raise ValueError(
            f"rules= do not fit '{directory}', with {len(stored)} arrays such as "
            f"{min(stored)}:\n  " + "\n  ".join(problems)
        )
    return keys


def _after(name: str, rules: Rules) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
