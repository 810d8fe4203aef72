"""Data sets of Hugging Face: folders, and repositories of the hub."""

from __future__ import annotations

import dataclasses
import glob
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors

from fsdp_jax.cli._dataset_layout import Configs, choose_split, find_configs

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# What looks like a hub id and ends so is a file that is not there.
_OF_FILES = re.compile(
    r"\.(txt|md|csv|tsv|json|jsonl|ndjson|parquet|arrow|gz|zst|bin|py|yaml)",
    re.IGNORECASE,
)
_README = "README.md"


@dataclasses.dataclass(frozen=True)
class DatasetName:
    """An entry of `--data` that is not a file: `NAME[@REVISION][:CONFIG][:SPLIT]`.

    Attributes:
      name: Folder, or hub id.
      revision: Branch, tag or commit of a hub id; None for the default.
      config: Config; None for the only one, or the default.
      split: Split; None for `train`, or the only one.
    """

    name: str
    revision: str | None = None
    config: str | None = None
    split: str | None = None

    @property
    def folder(self) -> Path | None:
        """Folder; None for a hub id."""
        path = Path(self.name)
        return path if path.is_dir() else None


def dataset_name(entry: Path) -> DatasetName | None:
    """Parses an entry of `--data`; None if it is a file, or no data set's name.

    Args:
      entry: File, folder or hub id, with config and split behind colons.
    """
    if entry.exists():
        return DatasetName(str(entry)) if entry.is_dir() else None
    name, *choice = str(entry).split(":")
    if len(choice) > 2:
        return None
    config, split = (None, None, *choice)[-2:]
    if Path(name).is_dir():
        return DatasetName(name, None, config, split)
    name, _, revision = name.partition("@")
    if not _HUB_ID.fullmatch(name) or _OF_FILES.fullmatch(Path(name).suffix):
        return None
    return DatasetName(name, revision or None, config, split)


def is_hub_id(entry: Path) -> bool:
    """Returns whether an entry of `--data` names a repository of the hub.

    Args:
      entry: Entry of `--data`.
    """
    named = dataset_name(entry)
    return named is not None and named.folder is None


def check_folder(entry: Path, option: str = "--data") -> None:
    """Raises a `ValueError` if a folder is not a data set, or lacks the split.

    Args:
      entry: Entry of `--data`; hub ids are not checked.
      option: Option that names it, for the message.
    """
    if not is_hub_id(entry):
        dataset_files(entry, option)


def dataset_files(entry: Path, option: str = "--data") -> list[Path]:
    """Returns the files of a split, after fetching those that the cache lacks.

    Args:
      entry: Folder or hub id, with config and split.
      option: Option that names it, for the message.

    Raises:
      ValueError: If there is no such data set, config or split, or the hub cannot be
        reached.
    """
    named = dataset_name(entry)
    assert named is not None, "the caller has asked"
    try:
        folder, names = _listed(named)
        chosen = _chosen(named, folder, names)
        if named.folder is None:
            folder = _fetch(named, folder.name, chosen)
    except ValueError as error:
        raise ValueError(f"{option} '{entry}': {error}.") from error
    return [folder / name for name in chosen]


def _chosen(named: DatasetName, folder: Path, names: Sequence[str]) -> list[str]:
    if (saved := _saved_to_disk(folder)) is not None:
        return choose_split(Configs(saved), named.config, named.split)
    configs = find_configs(names, _configs(folder / _README))
    return choose_split(configs, named.config, named.split)


def _saved_to_disk(folder: Path) -> dict[str, dict[str, list[str]]] | None:
    """Returns the splits that `save_to_disk` wrote; None for another layout."""
    if (folder / "state.json").is_file():
        state = _read_json(folder / "state.json")
        return {"default": {str(state.get("_split") or "train"): _files_of(state)}}
    if not (folder / "dataset_dict.json").is_file():
        return None
    splits = _read_json(folder / "dataset_dict.json").get("splits") or []
    splits = _inside([str(split) for split in splits])
    return {
        "default": {
            split: [
                f"{split}/{name}"
                for name in _files_of(_read_json(folder / split / "state.json"))
            ]
            for split in splits
        }
    }


def _files_of(state: Mapping[str, Any]) -> list[str]:
    try:
        names = [str(each["filename"]) for each in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise ValueError("a state.json without the list _data_files") from error
    return _inside(names)


def _inside(names: list[str]) -> list[str]:
    """Returns names of files; raises a `ValueError` if one leads out of the folder."""
    if outside := [name for name in names if {"..", "/"} & set(Path(name).parts)]:
        raise ValueError(f"names of files outside: {', '.join(outside)}")
    return names


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"'{file.name}' cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"'{file.name}' is not a JSON object")
    return found


def _configs(readme: Path) -> Sequence[Mapping[str, Any]]:
    """Returns the list `configs` of a README's header; empty if there is none."""
    if not readme.is_file():
        return ()
    try:
        header = huggingface_hub.metadata_load(readme)
    except Exception as error:  # yaml's errors and the card's share no base class
        reason = str(error).replace("\n", " ")
        raise ValueError(f"its README's header cannot be read ({reason})") from error
    found = (header or {}).get("configs") or ()
    if not isinstance(found, (list, tuple)) or not all(
        isinstance(each, dict) for each in found
    ):
        raise ValueError("its README's configs are not a list of objects")
    return found


def _listed(named: DatasetName) -> tuple[Path, list[str]]:
    """Returns a folder that has the README if there is one, and all names of files."""
    if (folder := named.folder) is not None:
        return folder, _names_in(folder)
    # By its revision, which the cache remembers, and the rest by the commit it is now.
    folder = _download(named, named.revision, [_README, ".gitattributes"])
    try:
        info = huggingface_hub.HfApi().dataset_info(named.name, revision=folder.name)
    except Exception:  # The hub has no answer: the cache has what it has.
        return folder, _names_in(folder)
    return folder, [each.rfilename for each in info.siblings or []]


def _fetch(named: DatasetName, commit: str, names: Sequence[str]) -> Path:
    return _download(named, commit, [glob.escape(name) for name in names])


def _download(named: DatasetName, revision: str | None, patterns: list[str]) -> Path:
    try:
        return Path(
            huggingface_hub.snapshot_download(
                named.name,
                repo_type="dataset",
                revision=revision,
                allow_patterns=patterns,
            )
        )
    except Exception as error:  # the hub's errors share no narrower base class
        raise ValueError(_explain(error)) from error


def _explain(error: Exception) -> str:
    match error:
        case errors.HFValidationError():
            return f"no hub id such as org/name ({error})"
        case errors.GatedRepoError():  # before its base class, the next
            return (
                "its hub repository is gated: accept the terms on its page, and log in "
                "(`hf auth login`)"
            )
        case errors.RepositoryNotFoundError():
            return (
                "no file or folder, and the hub has no such data set, or a private "
                "one: check the name, or log in (`hf auth login`)"
            )
        case errors.RevisionNotFoundError():
            return "its hub repository has no such revision"
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return (
        "no file or folder; as a hub id it is not in the cache, and the hub at "
        f"{constants.ENDPOINT} does not answer ({reason})"
    )


def _names_in(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in files)
