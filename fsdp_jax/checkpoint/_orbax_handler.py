"""Orbax handler and manager with our formats, file sizes and failure handling."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from fsdp_jax._compat import ORBAX_FINALIZE
from fsdp_jax.checkpoint._checksums import CHECKSUMMED, is_checksummed
from fsdp_jax.checkpoint._deferred_write import Writing
from fsdp_jax.checkpoint._leaf_names import Leaf
from fsdp_jax.checkpoint._manifest import (
    ITEM,
    DamagedCheckpointError,
    Identity,
    write_manifest,
)
from fsdp_jax.checkpoint._multihost import (
    TIMEOUT_SECS,
    collect,
    describe,
    exchange,
    publish,
    raise_others,
    reserve,
)
from fsdp_jax.checkpoint._orbax_store import atomicity
from fsdp_jax.checkpoint._paths import as_path, files_in, is_local, remove_tree
from fsdp_jax.checkpoint._replace import (
    finish_replacements,
    is_committed,
    is_step_name,
)
from fsdp_jax.checkpoint._seal_exchange import Sealing, take_seals
from fsdp_jax.checkpoint._store_path import COMMIT_MARKER
from fsdp_jax.checkpoint._zarr import crop, zarr_metadata

# Unit of reads: a load onto another mesh reads little more than it needs.
_CHUNK_BYTES = 32 * 2**20
# A file is written to disk while the next one is encoded; with Orbax's 2 GiB, a smaller
# state would be encoded completely before any write. Large states have larger files, so
# that a process has at most `_MAX_FILES` of them.
_FILE_BYTES = 64 * 2**20
_MAX_FILES = 64
# Orbax's suffix of a step's folder until it is committed.
UNFINISHED = ".orbax-checkpoint-tmp"
_FAILED = "failed"
# File that Orbax writes first.
_BEGUN = "_CHECKPOINT_METADATA"
# Types of what it holds.
_NOTED = {
    "item_handlers": (dict, str, NoneType),
    "metrics": (dict, NoneType),
    "performance_metrics": (dict, NoneType),
    "init_timestamp_nsecs": (int, NoneType),
    "commit_timestamp_nsecs": (int, NoneType),
    "custom_metadata": (dict, NoneType),
}
_ATTEMPTS = 20


class StateHandler(ocp.PyTreeCheckpointHandler):
    """Orbax handler with checksums, logical shapes, and a manifest as the last file."""

    def __init__(self, timeout_secs: float = TIMEOUT_SECS):
        # Every replica writes a part; Orbax's default depends on JAX_PLATFORMS.
        arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=True)
        types = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
        )
        super().__init__(
            use_zarr3=True, use_compression=CHECKSUMMED, type_handler_registry=types
        )
        self.timeout_secs = timeout_secs  # Until a silent process counts as lost.
        self._saving: StateSave | None = None
        self.failure: Exception | None = None

    async def async_save(
        self, directory: Any, item: Any = None, save_args: Any = None, args: Any = None
    ) -> Any:
        """Starts a save, and keeps what `finalize` needs; only one save runs at a time.

        With several processes, a failure is kept until all processes know of it:
        raising at once would leave the others waiting for this process in a barrier.
        """
        self._saving, self.failure = args, None
        last = [
            Writing(directory, args.contents),
            Sealing(directory, args.identity.attempt),
        ]
        if jax.process_count() == 1:
            futures = await super().async_save(directory, item, save_args, args)
            return [*(futures or []), *last]
        try:
            futures = await super().async_save(directory, item, save_args, args)
        except Exception as error:
            self.failure, futures = error, []
        return [_Outcome(self, args.point, [*(futures or []), *last])]

    def finalize(self, directory: Any) -> None:
        """Writes the manifest after all processes are done, before the commit."""
        assert self._saving is not None
        if jax.process_count() == 1:
            self._write_manifest(directory, self._saving)
            return
        try:
            raise_others("Saving", collect(self._saving.point, self.timeout_secs))
            self._write_manifest(directory, self._saving)
        except Exception as error:
            self.failure = self.failure or error
            # Orbax commits the folder after this. The marker lets the next save remove
            # it if this process is killed before it does so.
            with contextlib.suppress(OSError):
                (as_path(directory) / _FAILED).touch()

    def _write_manifest(self, directory: Any, saving: StateSave) -> None:
        super().finalize(directory)
        path, leaves = as_path(directory), saving.leaves
        sealed = take_seals(path, saving.identity.attempt)
        _check_checksummed(path)
        crop(path, {name: tuple(leaf.shape) for name, leaf in leaves.items()})
        _check_written(path, leaves)
        write_manifest(path, saving.identity, leaves, saving.metadata, sealed)


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """Writes of this process as one future, which publishes their outcome."""

    handler: StateHandler
    point: str
    futures: list[Any]

    def result(self, timeout: float | None = None) -> None:
        for future in self.futures:
            try:
                future.result(timeout)
            except Exception as error:
                self.handler.failure = self.handler.failure or error
        failure = self.handler.failure
        publish(self.point, None if failure is None else describe(failure))

    def cancel(self) -> None:
        for future in self.futures:
            future.cancel()


@ocp.args.register_with_handler(StateHandler, for_save=True)
@dataclasses.dataclass
class StateSave(ocp.args.PyTreeSave):
    """Arguments of a save.

    Attributes:
      leaves: Logical shape and dtype of every leaf of `item`.
      identity: Step, run and attempt.
      metadata: Metadata for the manifest, in JSON types.
      point: Exchange point at which processes publish the outcome of their writes.
      contents: Further files that this process writes, as for `Writing`.
    """

    leaves: dict[str, jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)
    identity: Identity = Identity(0, "", "")
    metadata: Any = None
    point: str = ""
    contents: Mapping[str, bytes | Path] = dataclasses.field(default_factory=dict)


@ocp.args.register_with_handler(StateHandler, for_restore=True)
@dataclasses.dataclass
class StateRestore(ocp.args.PyTreeRestore):
    """Arguments of a restore: Orbax requires them, `read_arrays` does not use them."""


def save_arguments(
    identity: Identity,
    leaves: dict[str, Leaf],
    metadata: Any,
    contents: Mapping[str, bytes | Path],
) -> ocp.args.Composite:
    """Returns the arguments for a manager's `save`."""
    item = {name: leaf.value for name, leaf in leaves.items()}
    chunked = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in leaves}
    abstract = {name: leaf.abstract for name, leaf in leaves.items()}
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in abstract.values())
    state = StateSave(
        item,
        chunked,
        ocdbt_target_data_file_size=file_bytes(num_bytes),
        leaves=abstract,
        identity=identity,
        metadata=metadata,
        point=reserve(),
        contents=contents,
    )
    return ocp.args.Composite(**{ITEM: state})


def file_bytes(num_bytes: int) -> int:
    """Returns the target file size for a state of `num_bytes` in all processes."""
    return max(_FILE_BYTES, num_bytes // jax.process_count() // _MAX_FILES)


# Questions of this process to jax's preemption service, which keeps one count as well.
_questions = itertools.count(1)


class _Manager(ocp.CheckpointManager):
    """Manager that removes no step before a newer one is committed.

    Orbax removes the steps that the preservation policy gives up once every process has
    written what it could, also if what one of them wrote is no step: see `finalize`.

    It numbers its questions whether to stop from 1, and not by steps. Processes stop at
    the question after the last that any of them had asked at the signal, which is 1
    before the first. By steps a resumed run would never ask that.
    """

    _stops = False

    def _finalize(self, step: int, steps_to_remove: list[int]) -> None:
        """Commits a step, and then removes those that it replaces.

        Args:
          step: Step that is being saved.
          steps_to_remove: Steps that the policy gives up for it.
        """
        super()._finalize(step, [])
        directory = as_path(self.directory)
        if jax.process_index() == 0 and is_committed(directory / str(step)):
            for old in steps_to_remove:
                remove_tree(directory / str(old))

    def must_stop(self) -> bool:
        """Asks whether all processes are to stop now; once after each step."""
        self._stops = super().reached_preemption(next(_questions))
        return self._stops

    def reached_preemption(self, step: int) -> bool:
        """Returns the last answer; Orbax asks several times about a step."""
        return self._stops


@contextlib.contextmanager
def manager(
    path: str | os.PathLike[str], handler: StateHandler, **options: Any
) -> Iterator:
    """Opens Orbax's manager of the steps under `path`, and closes it on exit.

    Raises:
      DamagedCheckpointError: If Orbax cannot read its own notes of a step.
      RuntimeError: If the installed Orbax removes steps in another way.
    """
    _check_is_known()
    directory = as_path(path).absolute()  # Orbax rejects relative paths.
    given = ocp.CheckpointManagerOptions(
        create=True, atomicity_options=atomicity(directory), **options
    )
    try:
        made = _Manager(directory, options=given, item_handlers={ITEM: handler})
    except ValueError as error:
        if files := _mistyped_notes(directory):
            raise DamagedCheckpointError(
                f"{len(files)} file(s) are not as Orbax wrote them: "
                f"{', '.join(files)}. They hold only timestamps: remove them."
            ) from error
        raise
    with made as opened:
        yield opened


def _check_is_known() -> None:
    """Raises if Orbax removes steps in another way than `_Manager` replaces."""
    if not hasattr(ocp.CheckpointManager, ORBAX_FINALIZE):
        raise RuntimeError(
            f"orbax-checkpoint {ocp.__version__} may remove old steps before a new one "
            "is committed: use a version that fsdp_jax was tested with."
        )


def _mistyped_notes(directory: Any) -> list[str]:
    """Returns Orbax's notes of steps that hold values of other types."""
    wrong = []
    for file in sorted(directory.glob(f"*/{_BEGUN}")):
        # Orbax ignores files that are not JSON.
        with contextlib.suppress(OSError, ValueError, RecursionError):
            noted = json.loads(file.read_bytes())
            if not isinstance(noted, dict) or any(
                not isinstance(noted.get(name), kinds) for name, kinds in _NOTED.items()
            ):
                wrong.append(f"'{file}'")
    return wrong


def remove_unfinished(path: Path) -> None:
    """Removes the folders of saves that did not complete.

    Orbax's own cleanup fails while a write of such a save still runs, so it is not
    used. Process 0 removes them; the others synchronize elsewhere.
    """
    if jax.process_index() > 0:
        return
    if not is_local(path):
        for folder in _unfinished_in_store(path):
            remove_tree(folder)
        return
    finish_replacements(path)
    for _ in range(_ATTEMPTS):
        failed = [marker.parents[1] for marker in path.glob(f"*/{ITEM}/{_FAILED}")]
        unfinished = [*path.glob(f"*{UNFINISHED}"), *failed]
        if not unfinished:
            return
        for folder in unfinished:
            remove_tree(folder)
        time.sleep(0.1)


def _unfinished_in_store(path: Path) -> list[Path]:
    """Returns the steps that Orbax began to write and that have no marker, or failed.

    A folder that Orbax did not begin is left alone.
    """
    inside: dict[str, set[str]] = {}
    for name in files_in(path):
        step, _, file = name.partition("/")
        inside.setdefault(step, set()).add(file)
    return [
        path / step
        for step, files in inside.items()
        if is_step_name(step)
        and (COMMIT_MARKER not in files or f"{ITEM}/{_FAILED}" in files)
        and any(file == _BEGUN or file.startswith(f"{ITEM}/") for file in files)
    ]


def raise_failure(handler: StateHandler, folder: Path) -> None:
    """Raises in every process if the last save failed in one.

    Removes the save's folder first. It has no manifest, so it never was a step.

    Raises:
      OtherProcessError: If the save failed in other processes only.
    """
    if jax.process_count() == 1:
        return
    failure = handler.failure
    # Before the exchange, after which other processes may start the next save.
    if failure is not None and jax.process_index() == 0:
        remove_tree(folder)
    said = None if failure is None else describe(failure)
    told = exchange(said, handler.timeout_secs)
    if failure is not None:
        raise failure
    raise_others(f"Saving '{folder}'", told)


def _check_checksummed(directory: Path) -> None:
    arrays = zarr_metadata(directory)
    if bare := [name for name, array in arrays.items() if not is_checksummed(array)]:
        raise RuntimeError(
            f"orbax-checkpoint {ocp.__version__} wrote no checksums for {len(bare)} "
            f"leaf/leaves, e.g. {bare[0]}: use a version that fsdp_jax was tested with."
        )


def _check_written(directory: Path, leaves: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Raises unless the disk has exactly these leaves, in their shapes and dtypes."""
    stored = {
        name: (tuple(array["shape"]), jnp.dtype(array["data_type"]))
        for name, array in zarr_metadata(directory).items()
    }
    asked = {name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    wrong = sorted(
        name
        for name in stored.keys() | asked.keys()
        if stored.get(name) != asked.get(name)
    )
    if wrong:
        raise RuntimeError(
            f"orbax-checkpoint {ocp.__version__} did not write what it was given, in "
            f"{len(wrong)} leaf/leaves: {', '.join(wrong)}. The step is not committed."
        )
