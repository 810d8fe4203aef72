"""Saving: a tree is written as a Hugging Face checkpoint, tensor by tensor."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import DTypeLike

from bridge._local_path import check_local
from bridge._new_directory import check_free, publish, temporary_directory
from bridge._tree import arrays_of, named_leaves
from bridge.formats._weight_files import INDEX_NAME
from bridge.hf._config_file import CONFIG_NAME
from bridge.hf._score_head import Head, fields_with_head, mapping_with_head
from bridge.models import DecoderConfig
from bridge.streaming._export import write_weights
from bridge.streaming._files import Entries, assign_files, entries_of, index_of
from bridge.streaming._load import Progress
from bridge.streaming._processes import agreeing
from bridge.streaming._sidecars import copy_sidecars, find_sidecars


def save_hf(
    path: str | os.PathLike[str],
    params: Any,
    config: DecoderConfig,
    *,
    head: Head = "lm_head",
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = 5 * 10**9,
    copy_from: str | os.PathLike[str] | None = None,
    checksums: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes a directory that transformers loads.

    One tensor is gathered to the host while the one before it is written. The write is
    atomic: the directory is renamed to its final name when it is complete and on disk,
    and a failure leaves nothing behind. In a job of several processes all of them must
    make this call: process 0 writes, to a local or a shared file system, and all return
    when that is done, or raise.

    Args:
      path: Directory that does not exist yet, or is empty.
      params: Pytree of arrays with any sharding, as `load_hf` returns it.
      config: Config of the decoder, written as `config.json`.
      head: Head of the model. With "score", that of a reward model, `score.kernel` of
        shape [embed, 1] is in place of an output projection, and the class is the
        family's `*ForSequenceClassification` with one label. transformers reads the
        score at the last token that is not `pad_token_id`.
      dtype: Floating dtype of the files; None keeps each leaf's own, so that what was
        loaded without a cast is written back bit by bit.
      max_shard_bytes: Size in bytes above which several files and an index are written.
        A tensor is never split over files.
      copy_from: Directory of a model whose tokenizer, chat template and
        `generation_config.json` are copied; None copies nothing.
      checksums: Whether to write `SHA256SUMS`, for `sha256sum --check`.
      progress: Called after each tensor with bytes written and total bytes.

    Raises:
      ValueError: If `path` is taken, or tree and config do not fit; everything that
        does not fit is listed, and nothing is written. If transformers has no class of
        the family with a score.

    Examples:
      >>> bridge.save_hf(path, params, config, dtype=jnp.bfloat16)
      >>> bridge.open_checkpoint(path).dtype("model.norm.weight").name
      'bfloat16'
    """
    check_local(path, copy_from)
    path = Path(path)
    writes = jax.process_index() == 0
    with agreeing():
        if writes:
            check_free(path)
        sidecars = [] if copy_from is None else find_sidecars(Path(copy_from))
        leaves = named_leaves(arrays_of(params))
        fields_with_head(config, head)  # A family without such a head is named first.
        mapping = mapping_with_head(config, head)
        mapping.check(leaves)
        pieces = mapping.by_source()
        tensors = entries_of(pieces, leaves, dtype)
        # What a config cannot say is refused here, and so is a dtype of the files.
        config = dataclasses.replace(config, dtype=_most_common_dtype(tensors).name)
        fields = fields_with_head(config, head)
        files = assign_files(tensors, max_shard_bytes)
    with contextlib.ExitStack() as stack:
        with agreeing():
            directory = (
                stack.enter_context(temporary_directory(path)) if writes else None
            )
        write_weights(directory, files, pieces, leaves, progress)
        with agreeing():
            if directory is not None:
                if len(files) > 1:
                    _write_json(directory / INDEX_NAME, index_of(files))
                _write_configs(directory, fields)
                if copy_from is not None:
                    copy_sidecars(Path(copy_from), sidecars, directory)
                if checksums:
                    _write_checksums(directory)
                publish(directory, path)


def _write_checksums(directory: Path) -> None:
    lines = []
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"{digest}  {path.relative_to(directory).as_posix()}\n")
    (directory / "SHA256SUMS").write_text("".join(lines))


def _most_common_dtype(entries: Entries) -> np.dtype:
    """Returns the dtype of most bytes: what transformers will load everything as."""
    totals: dict[np.dtype, int] = {}
    for shape, dtype in entries.values():
        totals[dtype] = totals.get(dtype, 0) + math.prod(shape) * dtype.itemsize
    return max(totals, key=lambda dtype: totals[dtype])


def _write_configs(directory: Path, fields: dict[str, Any]) -> None:
    _write_json(directory / CONFIG_NAME, fields)
    tokens = {
        name: fields[name]
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if fields[name] is not None
    }
    if tokens:  # without it transformers generates past the end of the text
        _write_json(
            directory / "generation_config.json",
            {"_from_model_config": True, **tokens},
        )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(_tagged(value), indent=2, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _tagged(value: Any) -> Any:
    """Returns a value with infinities as transformers 5 writes them: JSON has none."""
    if isinstance(value, dict):
        return {name: _tagged(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_tagged(inner) for inner in value]
    if isinstance(value, float) and math.isinf(value):
        return {"__float__": "Infinity" if value > 0 else "-Infinity"}
    return value
