"""Checkpoint discovery: the directory of an iteration and its format."""

import os
import re
from pathlib import Path

from bridge._local_path import check_local
from bridge.formats._json import read_json
from bridge.megatron._ranks import RANK_DIRECTORY
from bridge.megatron.read._dcp import METADATA_NAME

TRACKER_NAME = "latest_checkpointed_iteration.txt"
FORMAT_NAME = "metadata.json"

# Subdirectories in which NeMo stores weights.
_WEIGHTS_DIRECTORIES = ("weights", "model_weights")


def find_iteration(path: Path) -> Path:
    """Returns the directory that holds the tensors of the iteration to read.

    Args:
      path: Directory of a run, of which the tracker file names the latest iteration,
        or directory of one iteration.

    Raises:
      FileNotFoundError: If `path` does not exist.
      ValueError: If `path` holds no Megatron checkpoint.
    """
    check_local(path)
    if not path.exists():
        raise FileNotFoundError(f"No checkpoint at '{path}': nothing is there.")
    if (path / TRACKER_NAME).is_file():
        path = path / _tracked(path / TRACKER_NAME)
    inner = [path, *(path / name for name in _WEIGHTS_DIRECTORIES)]
    found = [directory for directory in inner if _is_iteration(directory)]
    if not found:
        raise ValueError(
            f"'{path}' is not a Megatron checkpoint: it has no '{TRACKER_NAME}', no "
            f"'{FORMAT_NAME}', no '{METADATA_NAME}' and no 'mp_rank_*' directory."
        )
    return found[0]


def is_megatron(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path looks like a Megatron checkpoint, without opening it.

    Only file names and the tracker file are examined, so `open_megatron` may still
    reject the checkpoint.
    """
    check_local(path)
    try:
        find_iteration(Path(path))
    except (ValueError, FileNotFoundError):
        return False
    return True


def _is_iteration(path: Path) -> bool:
    if any((path / name).is_file() for name in (FORMAT_NAME, METADATA_NAME)):
        return True
    return path.is_dir() and any(
        RANK_DIRECTORY.fullmatch(entry.name) for entry in path.iterdir()
    )


def _tracked(tracker: Path) -> str:
    text = tracker.read_text().strip()
    if text == "release":
        return text
    if not re.fullmatch(r"\d{1,12}", text):
        raise ValueError(f"'{tracker}' holds {text[:50]!r}, no iteration.")
    return f"iter_{int(text):07d}"


def find_format(directory: Path) -> str:
    """Returns a checkpoint's format: `"torch_dist"`, `"dcp"` or `"legacy"`.

    Raises:
      ValueError: If `metadata.json` names another format.
    """
    file = directory / FORMAT_NAME
    if not file.is_file():
        return "dcp" if (directory / METADATA_NAME).is_file() else "legacy"
    fields = read_json(file, f"'{file}'")
    backend = fields.get("sharded_backend")
    if backend != "torch_dist":
        raise ValueError(
            f"'{directory}' is of the format {backend!r}, which is not read. Load it "
            "with a Megatron-Core before 0.15 and save it with --ckpt-format "
            "torch_dist."
        )
    return backend
