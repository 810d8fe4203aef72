"""Splits of a data set, by the names of its files and the header of its README."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

Splits = Mapping[str, Sequence[str]]
"""Names of the files of each split."""


@dataclasses.dataclass(frozen=True)
class Configs:
    """Configs of a data set.

    Attributes:
      splits: Splits of each config.
      default: Config that is read if none is named; None if one must be.
    """

    splits: Mapping[str, Splits]
    default: str | None = "default"


SUFFIXES = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json")
"""Formats of data sets; JSON also compressed."""

_COMPRESSED = (".gz", ".zst")
# No records: what `datasets` writes beside them.
_DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json", "state.json")
_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SHARDED = re.compile(r"data/([^/]+?)-\d{5}-of-\d+[^/]*\.[^/]*")
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(.*)")


def format_of(name: str) -> str:
    """Returns the suffix of a file without compression, in lower case.

    Args:
      name: Name of the file.
    """
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def find_configs(names: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> Configs:
    """Finds the files of each split of each config, as the hub does.

    A README lists configs, with patterns of files. Without it there is one, whose
    splits are in the names of folders or files: `data/train-00000-of-00002.parquet`,
    `test/0.jsonl`; files that name no split are all of `train`.

    Args:
      names: Names of all files, relative to the data set's folder.
      configs: List `configs` of the README's header; empty if there is none.

    Raises:
      ValueError: If there are no data files, or patterns match none.
    """
    files = sorted(filter(_is_data, names))
    if not files:
        raise ValueError(f"no data files ({', '.join(SUFFIXES)})")
    if not configs:
        return Configs({"default": _splits_by_name(_of_one_format(files))})
    found = {_name_of(x): _splits_of_config(x, files) for x in configs}
    marked = [_name_of(each) for each in configs if each.get("default")]
    only = [name for name in found if name == "default" or len(found) == 1]
    return Configs(found, next(iter([*marked, *only]), None))


def _name_of(config: Mapping[str, Any]) -> str:
    return str(config.get("config_name", "default"))


def choose_split(configs: Configs, config: str | None, split: str | None) -> list[str]:
    """Returns the files of a split.

    Args:
      configs: Configs from `find_configs`.
      config: Name of the config; None for the default.
      split: Name of the split; None for `train`, or the only one.

    Raises:
      ValueError: If there is none of this name, or files of it are missing.
    """
    config = configs.default if config is None else config
    if config is None or config not in configs.splits:
        subject = "several configs" if config is None else f"no config '{config}'"
        raise ValueError(f"{subject}: choose one of {', '.join(configs.splits)}")
    splits = configs.splits[config]
    if split is None:
        split = next(iter(splits)) if len(splits) == 1 else "train"
    if split not in splits:
        raise ValueError(f"no split '{split}': choose one of {', '.join(splits)}")
    files = list(splits[split])
    if missing := _missing_shards(files):
        raise ValueError(f"split '{split}' lacks {', '.join(missing)}")
    return files


def _is_data(name: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith((".", "_")) for part in path.parts)
    return not hidden and path.name not in _DESCRIPTIONS and format_of(name) in SUFFIXES


def _of_one_format(files: Sequence[str]) -> Sequence[str]:
    formats = sorted(set(map(format_of, files)))
    if len(formats) > 1:
        raise ValueError(
            f"files of several formats ({', '.join(formats)}), and no configs in the "
            "README that say which are its data"
        )
    return files


def _splits_by_name(files: Sequence[str]) -> Splits:
    sharded = [
        (match[1], match[0]) for match in map(_SHARDED.fullmatch, files) if match
    ]
    if sharded:
        return _grouped(sharded)
    for parts in (_folders, _file_name):
        named = [
            (split, file)
            for split, words in _KEYWORDS.items()
            for file in files
            if any(_has_word(part, words) for part in parts(file))
        ]
        if named:
            return _grouped(named)
    return {"train": files}


def _folders(file: str) -> Sequence[str]:
    return PurePosixPath(file).parts[:-1]


def _file_name(file: str) -> Sequence[str]:
    return PurePosixPath(file).parts[-1:]


def _has_word(part: str, words: Sequence[str]) -> bool:
    return not set(re.split(r"[-._ 0-9]+", part)).isdisjoint(words)


def _grouped(pairs: Sequence[tuple[str, str]]) -> Splits:
    found: dict[str, list[str]] = {}
    for split, file in pairs:
        found.setdefault(split, []).append(file)
    return found


def _splits_of_config(config: Mapping[str, Any], files: Sequence[str]) -> Splits:
    folder = str(config.get("data_dir") or "").strip("/")
    inside = [f for f in files if not folder or f.startswith(f"{folder}/")]
    patterns = config.get("data_files")
    if patterns is None:
        return _splits_by_name(inside)
    found = {}
    for split, globs in _patterns_by_split(patterns).items():
        wanted = [str(PurePosixPath(folder, str(glob))) for glob in globs]
        matched = [f for f in files if any(_matches(f, glob) for glob in wanted)]
        if not matched:
            raise ValueError(f"no file of split '{split}' matches {', '.join(wanted)}")
        found[split] = matched
    return found


def _patterns_by_split(patterns: Any) -> dict[str, list[str]]:
    if isinstance(patterns, Mapping):
        return {str(split): _listed(globs) for split, globs in patterns.items()}
    listed = _listed(patterns)
    if not all(isinstance(each, Mapping) for each in listed):
        return {"train": [str(each) for each in listed]}
    return {str(x.get("split", "train")): _listed(x.get("path", [])) for x in listed}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _matches(name: str, glob: str) -> bool:
    from fsspec.utils import glob_translate

    return re.match(glob_translate(glob), name) is not None


def _missing_shards(files: Sequence[str]) -> list[str]:
    """Returns shards that others of the same name count, and that are not there."""
    expected = {
        f"{match[1]}-{index:05d}-of-{match[3]}{match[4]}"
        for match in map(_SHARD.fullmatch, files)
        if match
        for index in range(int(match[3]))
    }
    return sorted(expected - set(files))
