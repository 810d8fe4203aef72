"""Saving: writes a model's tensors as a checkpoint that Megatron loads."""

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bridge._local_path import check_local
from bridge.formats._pickle_writer import Name, Object
from bridge.formats._source import Source
from bridge.formats._torch_dtypes import DTYPE_NAMES
from bridge.formats._torch_writer import TorchWriter
from bridge.megatron._names import EMBEDDING, HEAD
from bridge.megatron._pipeline import Pipeline
from bridge.megatron._ranks import ParallelSizes
from bridge.megatron._vocab import padded_shape
from bridge.megatron.read._checkpoint import COMMON_NAME
from bridge.megatron.read._find import TRACKER_NAME
from bridge.megatron.write._legacy import check_pipeline, write_legacy
from bridge.megatron.write._torch_dist import slots_of, write_torch_dist
from bridge.streaming._load import Progress

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
_PLAIN = (type(None), bool, int, float, str, bytes)


def write_megatron(
    path: str | os.PathLike[str],
    source: Source,
    args: Mapping[str, Any],
    *,
    format: Literal["torch_dist", "legacy"] = "torch_dist",
    iteration: int | None = None,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    vpp: int = 1,
    max_file_bytes: int = 5 * 10**9,
    progress: Progress | None = None,
) -> None:
    """Writes a checkpoint that Megatron's `--load` reads, without Megatron or torch.

    One tensor is in memory at a time. The write is atomic: the directory is renamed to
    its final name when it is complete, and a failure leaves nothing behind. A
    `torch_dist` checkpoint is independent of parallel sizes: any run reads it.

    Args:
      path: Directory that does not exist yet, or is empty.
      source: Tensors of a model by canonical name, as in `MegatronCheckpoint.source`.
        Embedding and head are padded with zeros to the multiple that Megatron needs.
      args: Settings of the run that will load the checkpoint, by Megatron's names.
        `num_layers`, `num_experts` and other values that follow from the tensors are
        set automatically. Values must be plain or numpy dtypes; see `plain_args`.
      format: `"torch_dist"`, or `"legacy"` (`--ckpt-format torch`).
      iteration: Number of training steps done; None writes a `release`.
      tp: Number of tensor-parallel ranks. Legacy only, as are the next three arguments.
      pp: Number of pipeline stages.
      ep: Number of expert-parallel ranks.
      vpp: Number of model chunks per stage (virtual pipeline).
      max_file_bytes: Size in bytes at which a `torch_dist` file is closed and the next
        one started.
      progress: Called after each tensor with bytes written and total bytes.

    Raises:
      ValueError: If `path` exists and is not an empty directory, if `args` contradict
        the tensors, or if the parallel sizes do not divide the model; nothing is
        written.
    """
    check_local(path)
    path, sizes = Path(path), ParallelSizes(tp, pp, ep)
    _check_path(path)
    if format == "torch_dist" and (*sizes, vpp) != (1, 1, 1, 1):
        raise ValueError(
            f"torch_dist fits any run: leave out TP {tp}, PP {pp}, EP {ep}, VPP {vpp}."
        )
    multiple = (args.get("make_vocab_size_divisible_by") or 128) * tp
    args = _with_facts(source, args, sizes, vpp, multiple)
    common, tick = _common(args, iteration), _counter(source, progress)
    name = "release" if iteration is None else f"iter_{iteration:07d}"
    if format == "legacy":
        pipeline = Pipeline(sizes, vpp, args["num_layers"], args["num_experts"] or 0)
        check_pipeline(source, pipeline, args, multiple)
        with _directory(path, name) as directory:
            write_legacy(
                directory, source, common, args, pipeline, multiple=multiple, tick=tick
            )
        return
    slots = slots_of(source, args)
    with _directory(path, name) as directory:
        with (directory / COMMON_NAME).open("wb") as file, TorchWriter(file) as writer:
            writer.finish(common)
        write_torch_dist(
            directory,
            source,
            slots,
            multiple=multiple,
            max_file_bytes=max_file_bytes,
            tick=tick,
        )


def _check_path(path: Path) -> None:
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(
            f"Cannot save to '{path}': it exists and is not an empty directory. Give "
            "a new name, or remove it first."
        )


@contextlib.contextmanager
def _directory(path: Path, name: str) -> Iterator[Path]:
    """Yields a temporary iteration directory; renames its parent to `path` on success.

    The tracker file is written and all files are synced before the rename.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as temp:
        # Rename a subdirectory, because the temporary directory itself has mode 0700.
        root = Path(temp) / "checkpoint"
        (root / name).mkdir(parents=True)
        yield root / name
        number = name.removeprefix("iter_")
        tracked = str(int(number)) if number.isdigit() else name
        (root / TRACKER_NAME).write_text(tracked)
        for file in root.rglob("*"):
            if file.is_file():  # durable before the rename makes it visible
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
        root.rename(path)


def plain_args(args: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Separates the settings of a checkpoint that can be written from the others.

    Args:
      args: Settings as in `MegatronCheckpoint.args`; some are objects of Megatron's
        classes.

    Returns:
      Plain settings for `write_megatron`, and the names of all other settings.
    """
    plain = {key: value for key, value in args.items() if _is_plain(value)}
    return plain, tuple(key for key in args if key not in plain)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    return type(value) in _PLAIN or (
        isinstance(value, np.dtype) and value in DTYPE_NAMES
    )


def _with_facts(
    source: Source,
    args: Mapping[str, Any],
    sizes: ParallelSizes,
    vpp: int,
    multiple: int,
) -> dict[str, Any]:
    """Sets args that follow from tensors and sizes; raises if `args` differ."""
    keys = source.keys()
    if EMBEDDING not in keys:
        raise ValueError(f"'{source.name}' has no '{EMBEDDING}': it is no whole model.")
    rows = padded_shape(EMBEDDING, source.shape(EMBEDDING), multiple)[0]
    told = {
        "num_layers": _count("layers", _LAYER, source),
        "num_experts": _count("experts", _EXPERT, source) or None,
        "untie_embeddings_and_output_weights": HEAD in keys,
    }
    wrong = [
        f"  {name}: args say {args[name]!r}, the tensors {value!r}"
        for name, value in told.items()
        if args.get(name) is not None and args[name] != value
    ]
    _, objects = plain_args(args)
    wrong += [f"  {name}: {args[name]!r} is no plain value" for name in objects]
    wrong += [
        f"  {key}: torch has no dtype {source.dtype(key)}"
        for key in keys
        if source.dtype(key) not in DTYPE_NAMES
    ]
    if wrong:
        raise ValueError(f"'{source.name}' and args do not fit:\n" + "\n".join(wrong))
    return {
        **args,
        **told,
        "padded_vocab_size": rows,
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": sizes.tp,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
    }


def _count(what: str, pattern: re.Pattern[str], source: Source) -> int:
    numbers = {int(m[1]) for key in source.keys() if (m := pattern.search(key))}
    missing = sorted(set(range(max(numbers, default=-1) + 1)) - numbers)
    if missing:
        raise ValueError(f"'{source.name}' has no {what} {missing}: it is incomplete.")
    return len(numbers)


def _common(args: Mapping[str, Any], iteration: int | None) -> dict[str, Any]:
    state = {key: _as_torch(value) for key, value in args.items()}
    return {
        "args": Object(Name("argparse.Namespace"), state),
        "checkpoint_version": 3.0,
        "iteration": iteration or 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"singleton_local_shards": False},
    }


def _as_torch(value: Any) -> Any:
    if isinstance(value, np.dtype):
        return Name(f"torch.{DTYPE_NAMES[value]}")
    return value


def _counter(source: Source, progress: Progress | None) -> Callable[[int], None]:
    total = sum(
        int(np.prod(source.shape(key), dtype=int)) * source.dtype(key).itemsize
        for key in source.keys()
    )
    done = 0

    def tick(nbytes: int) -> None:
        nonlocal done
        done = min(done + nbytes, total)  # rows of padding are not counted
        if progress is not None:
            progress(done, total)

    return tick
