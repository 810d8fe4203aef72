"""Editing of distributed checkpoints (`torch_dist`, `fsdp_dtensor`), chunk by chunk."""

import os
import shutil
from pathlib import Path

from bridge._box import shape_of
from bridge._cast import check_range
from bridge._local_path import check_local
from bridge._new_directory import check_free
from bridge.formats._edits import Edits
from bridge.megatron.read._dcp import METADATA_NAME, StatePath, open_dcp
from bridge.megatron.read._find import find_iteration
from bridge.megatron.write._dcp import DcpWriter
from bridge.megatron.write._directory import new_checkpoint
from bridge.streaming._load import Progress


def edit_distributed(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    edits: Edits,
    *,
    progress: Progress | None = None,
) -> None:
    """Writes a distributed checkpoint with other keys, other dtypes or fewer entries.

    Keys are those on disk, such as `decoder.layers.mlp.linear_fc1.weight`. Chunks keep
    their boundaries, and one is in memory at a time. Objects that are not tensors are
    copied byte by byte, and so are the other files of the directory.

    Args:
      src: Directory of a run, of which the latest iteration is edited, or of one
        iteration.
      dst: Directory that does not exist yet, or is empty.
      edits: Changes of keys and dtypes.
      progress: Called after each tensor with the number of tensors written, and of all.

    Raises:
      FileNotFoundError: If `src` does not exist.
      ValueError: If `src` is damaged or no distributed checkpoint, `dst` is taken, or
        the edits cannot be made, or a number is beyond the largest of its new
        dtype; nothing is written.
    """
    check_local(src, dst)
    check_free(Path(dst))
    directory = find_iteration(Path(src))
    if not (directory / METADATA_NAME).is_file():
        raise ValueError(
            f"'{directory}' is not a distributed checkpoint: it has no "
            f"'{METADATA_NAME}'. Convert it to torch_dist first."
        )
    dcp = open_dcp(directory)
    dtypes = {key: tensor.dtype for key, tensor in dcp.tensors.items()}
    names, cast = edits.apply(dtypes, dcp.items)
    is_named = directory.name.startswith("iter_") or directory.name == "release"
    with new_checkpoint(Path(dst), directory.name if is_named else "release") as out:
        with DcpWriter(out) as writer:
            for number, (key, dtype) in enumerate(cast.items(), 1):
                for tile in dcp.tensors[key].tiles:
                    array = tile.part.read().reshape(shape_of(tile.box))
                    check_range(array, dtype, key)
                    offsets = tuple(r.start for r in tile.box)
                    writer.add(names[key], offsets, array.astype(dtype, copy=False))
                if progress is not None:
                    progress(number, len(cast))
            for key in dcp.items:
                if key in names:
                    writer.add_raw(names[key], dcp.raw[key]())
            for key, path in dcp.paths.items():
                if key in names:
                    writer.add_path(names[key], _path_of(names[key], path))
            writer.finish()
        for file in sorted(directory.iterdir()):
            if file.is_file() and file.suffix != ".distcp" and file.name[0] != ".":
                shutil.copy2(file, out / file.name)


def _path_of(key: str, path: StatePath) -> StatePath:
    """Returns the path of a renamed entry, in the dicts that begin its new name.

    Args:
      key: New key.
      path: Path of the entry before.
    """
    if key == ".".join(map(str, path)):
        return path
    for length in range(len(path) - 1, 0, -1):
        prefix = "".join(f"{part}." for part in path[:length])
        if key.startswith(prefix) and key != prefix:
            return *path[:length], key.removeprefix(prefix)
    return (key,)
