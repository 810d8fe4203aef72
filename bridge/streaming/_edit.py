"""Editing of Hugging Face checkpoints, tensor by tensor."""

import json
import os
from pathlib import Path

import numpy as np

from bridge._cast import check_range
from bridge._local_path import check_local
from bridge._new_directory import new_directory
from bridge.formats._edits import Edits
from bridge.formats._safetensors import encode_header
from bridge.formats._weight_files import INDEX_NAME, open_checkpoint
from bridge.streaming._beside import copy_beside, find_beside
from bridge.streaming._files import assign_files, index_of
from bridge.streaming._header_metadata import edit_metadata
from bridge.streaming._load import Progress

_MAX_SHARD_BYTES = 5 * 10**9


def edit_safetensors(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    edits: Edits,
    *,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Writes a safetensors checkpoint with other names, other dtypes or fewer tensors.

    One tensor is in memory at a time; the directory appears when it is complete. Files
    of a directory that hold no weights (config, tokenizer) are copied, but checksums
    are not. The config's dtype follows a cast that leaves one floating dtype.

    Args:
      src: Directory or file, as `open_checkpoint` takes it.
      dst: Directory that does not exist yet.
      edits: Changes of names and dtypes.
      max_shard_bytes: Size in bytes above which there are several files and an index.
      progress: Called after each tensor with bytes written and total bytes.

    Raises:
      FileNotFoundError: If `src` does not exist.
      ValueError: If `src` is damaged, `dst` exists, or the edits cannot be made, or
        a file to copy is a link to one elsewhere;
        nothing is written.

    Examples:
      >>> edits = bridge.Edits(cast=(("*", np.dtype(jnp.bfloat16)),))
      >>> bridge.edit_safetensors("small-llama", path + "/edited", edits)
      >>> bridge.open_checkpoint(path + "/edited").dtype("model.norm.weight").name
      'bfloat16'
    """
    check_local(src, dst)
    source = open_checkpoint(src)
    if Path(dst).exists():
        raise ValueError(f"Cannot write '{dst}': it exists. Give a new name.")
    names, dtypes = edits.apply({key: source.dtype(key) for key in source.keys()})
    olds = {new: old for old, new in names.items()}
    entries = {new: (source.shape(old), dtypes[old]) for new, old in olds.items()}
    metadata = edit_metadata(source, names)
    beside = find_beside(Path(src))
    files = assign_files(entries, max_shard_bytes)
    total = sum(int(np.prod(s, dtype=int)) * d.itemsize for s, d in entries.values())
    done = 0
    with new_directory(Path(dst)) as directory:
        for file, held in files.items():
            ordered = dict(sorted(held.items(), key=lambda e: -e[1][1].itemsize))
            with (directory / file).open("wb") as stream:
                stream.write(encode_header(ordered, metadata))
                for new, (_, dtype) in ordered.items():
                    array = source.read(olds[new])
                    check_range(array, dtype, olds[new])
                    array = array.astype(dtype, copy=False)
                    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                    stream.write(data)
                    done += len(data)
                    if progress is not None:
                        progress(done, total)
        if len(files) > 1:
            (directory / INDEX_NAME).write_text(json.dumps(index_of(files), indent=2))
        cast = entries.values() if edits.cast else ()
        copy_beside(Path(src), beside, directory, [dtype for _, dtype in cast])
