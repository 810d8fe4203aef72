"""Saves and loads steps on the hosts' disks, which are fast but may be lost."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import shutil
import socket
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from fsdp_jax._local_path import check_local
from fsdp_jax._tree import PyTree
from fsdp_jax.checkpoint._leaf_names import Leaf, flatten
from fsdp_jax.checkpoint._multihost import (
    LostProcessError,
    digest_of,
    exchange,
    gather,
    raise_unless_same,
    together,
)
from fsdp_jax.checkpoint._objects import Extra, capture
from fsdp_jax.checkpoint._replace import write_through
from fsdp_jax.checkpoint._run_id import make_run_id
from fsdp_jax.checkpoint._save import Beside, newest_run
from fsdp_jax.checkpoint._typed_json import encode
from fsdp_jax.checkpoint.local._assets import read_files
from fsdp_jax.checkpoint.local._format import Bytes, Header, file_name, pack, parse
from fsdp_jax.checkpoint.local._layout import layout_of
from fsdp_jax.checkpoint.local._load import Restored, Wanted, load_newest, survey
from fsdp_jax.checkpoint.local._plan import folder_name, step_of
from fsdp_jax.checkpoint.local._replication import (
    check_apart,
    check_replication_groups,
    make_replication_groups,
    place_of,
    rounds,
)
from fsdp_jax.checkpoint.local._transport import send
from fsdp_jax.training._state import TrainState

_OPENING = "Opening the local checkpoints"
_SAVING = "Saving locally"
# Suffix of the folder of a step that a rollback gave up.
_ABANDONED = ".abandoned"


@dataclasses.dataclass(frozen=True)
class LocalCheckpoints:
    """Options of checkpoints on the disks of the hosts.

    Each process writes the shards of its own devices, and those of the other processes
    of its replication group, which it receives by collectives. A host that was lost
    gets its shards from there, also if the state is fully sharded and has no replica.

    The steps take up to `keep + 1` times the shards of a group on each disk, after a
    rollback `2 * keep + 1` times, and a save takes host memory for the shards of a
    group. A step is complete once it is flushed
    (fsync) on all hosts, which happens in the background: after a crash, also a power
    failure of all hosts, it is either complete or ignored.

    The files of a step are read in each process, and must be equal in all.

    The first save after `Checkpointer.resume` sets aside the complete local steps that
    are newer than the loaded one, in place of those set aside before. It deletes the
    incomplete ones, except those of which another process's directory is not here, as
    in a start with fewer processes: these are kept until a newer step is complete.

    Attributes:
      path: Directory on each host, not shared between hosts; created if missing. Each
        run has a folder of its own in it.
      every: Interval of steps to save.
      keep: Number of steps to keep.
      replication_groups: Replication groups. None for pairs of neighbours,
        `make_replication_groups(jax.process_count())`, or no copies where all processes
        have one directory, as on one machine.
        If replicas are on other hosts anyway (HSDP), `make_replication_groups(...,
        size=1)` avoids the copies.

    Source: nvidia-resiliency-ext checkpointing/local/ckpt_managers/local_manager.py
    """

    path: str | os.PathLike[str]
    every: int
    keep: int = 2
    replication_groups: Sequence[Sequence[int]] | None = None

    def __post_init__(self):
        check_local(self.path)
        for name in ("every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"LocalCheckpoints: {name}={getattr(self, name)} must be at least "
                    "1."
                )


class LocalStore:
    """Local steps of a run; all processes must call every method alike."""

    def __init__(
        self,
        options: LocalCheckpoints,
        persistent: str | os.PathLike[str],
        timeout_secs: float,
    ):
        """Opens the folder of the run.

        Args:
          options: Options of the user.
          persistent: Directory of the run. It has the run's id, so that local steps of
            another run on the same disk are not taken for this run's.
          timeout_secs: Seconds after which another process has failed.

        Raises:
          ValueError: If the replication groups do not fit the job.
        """
        self._options = options
        self._timeout_secs = timeout_secs
        count = jax.process_count()
        if (groups := options.replication_groups) is not None:
            check_replication_groups(groups, count)  # before the disk is touched
        first = jax.process_index() == 0
        run = gather(
            _OPENING, lambda: _run_id(persistent) if first else None, timeout_secs
        )[0]
        self._directory = Path(options.path).absolute() / run
        told = gather(_OPENING, self._open, timeout_secs)
        self._places = [place for place, _ in told]
        if groups is None:
            # Copies in one directory would be lost with their originals.
            size = min(2, len(set(self._places)))
            groups = make_replication_groups(count, size=size)
        self._replication_groups = check_replication_groups(groups, count)
        check_apart(self._replication_groups, self._places)
        self._hosts = [host for _, host in told]
        self._complete: list[str] = []  # Folders of complete steps, oldest first.
        self._elsewhere: list[str] = []  # Folders that another start could use.
        self._writing: _Writing | None = None

    def is_due(self, step: int) -> bool:
        """Returns whether to save a step."""
        return step % self._options.every == 0

    def make_way(self, after: int) -> None:
        """Looks at the local steps before the first save, and makes way for it.

        Complete steps behind `after` are set aside, and those that an earlier rollback
        set aside are removed. Steps of which a directory is not part of this job are
        kept until a newer one is complete, since a start with it could use them. Other
        incomplete ones are removed.

        Args:
          after: Step that the run goes on from.
        """
        found = survey(self._directory, self._places, self._timeout_secs)
        complete = [one for one in reversed(found) if one.is_complete]
        aside = [one.folder for one in complete if one.step > after]
        self._complete = [one.folder for one in complete if one.step <= after]
        self._elsewhere = [one.folder for one in found if one.is_elsewhere]
        rank = jax.process_index()
        with together(_SAVING, self._timeout_secs):
            # Of processes that share a directory one acts: another would remove what
            # it has set aside.
            if self._places.index(self._places[rank]) == rank:
                self._set_aside(aside, after)
                self._remove_others()

    def save(self, step: int, state: TrainState, beside: Beside) -> None:
        """Copies the shards to host and peers; writes them in the background.

        Removes unfinished saves, after `make_way`.

        Args:
          step: Number of the step.
          state: State to save.
          beside: Further values of the step; each process reads the files itself.

        Raises:
          ValueError: If the processes pass different values, or some cannot be stored.
        """
        assert self._writing is None
        rank = jax.process_index()
        with together(_SAVING, self._timeout_secs):
            leaves, header = self._describe(state, beside)
            self._remove_others()
            alike = digest_of([step, header.layout.as_json(), header.about])
        told = exchange([alike, secrets.token_hex(8)], self._timeout_secs)
        raise_unless_same("What is saved locally", [digest for digest, _ in told])
        # Process 0's random id, so that files of an interrupted attempt at this step
        # are not taken for those of this one.
        folder = folder_name(step, told[0][1])
        header = dataclasses.replace(header, folder=folder)
        with together(_SAVING, self._timeout_secs):
            files = {rank: pack(header, leaves)}
        sizes = dict(enumerate(exchange(len(files[rank]), self._timeout_secs)))
        with together(_SAVING, self._timeout_secs):
            for pairs in rounds(self._replication_groups):
                content = send(pairs, files[rank], sizes, self._timeout_secs)
                if content is not None:
                    (source,) = [a for a, b in pairs if b == rank]
                    files[source] = content
        self._writing = _Writing(self._directory / folder, files)

    def settle(self) -> tuple[int, Exception] | None:
        """Waits for the running save; returns its step and error if it failed.

        Raises:
          LostProcessError: If another process does not answer.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        step = step_of(writing.folder.name)
        assert step is not None
        try:
            gather(
                f"Saving local step {step}",
                lambda: writing.wait(self._timeout_secs),
                self._timeout_secs,
            )
        except LostProcessError:
            raise
        except Exception as error:
            shutil.rmtree(writing.folder, ignore_errors=True)
            logging.getLogger("fsdp_jax").error(
                "Local step %d is not saved: %s", step, error
            )
            return step, error
        self._complete = [*self._complete, writing.folder.name][-self._options.keep :]
        self._remove_others()
        return None

    def load(
        self, like: PyTree, extras: Mapping[str, Extra], steps: range
    ) -> Restored | None:
        """Loads the newest complete step, or returns None if there is none.

        Args:
          like: Abstract state.
          extras: Objects whose state to restore.
          steps: Acceptable steps.

        Raises:
          ValueError: If the step does not fit the request.
        """
        wanted = Wanted(like, extras)
        restored = load_newest(
            self._directory, wanted, steps, self._places, self._timeout_secs
        )
        if restored is not None:
            self._complete = restored.complete[-self._options.keep :]
        return restored

    def _open(self) -> tuple[str, str]:
        self._directory.mkdir(parents=True, exist_ok=True)
        return place_of(self._directory), socket.gethostname()

    def _describe(
        self, state: TrainState, beside: Beside
    ) -> tuple[dict[str, Leaf], Header]:
        captured = capture(beside.extras or {})
        files = read_files(beside.files or {})
        leaves = flatten(state) | captured.leaves | files
        about = {
            "files": {n: zlib.crc32(file.value) for n, file in files.items()},
            "metadata": encode(beside.metadata or {}),
            "extras": captured.shared,
            "own": sorted(captured.own),
            "impls": {name: leaf.impl for name, leaf in leaves.items() if leaf.impl},
            "replication_groups": self._replication_groups,
            "hosts": self._hosts,
            "places": self._places,
        }
        own = {name: captured.documents[name] for name in captured.own}
        return leaves, Header(jax.process_index(), "", layout_of(leaves), about, own)

    def _set_aside(self, folders: Sequence[str], after: int) -> None:
        """Renames the folders of steps that the run gives up, in place of older ones.

        Args:
          folders: Names of these folders; some may be on other hosts only.
          after: Step that the run goes on from.
        """
        if folders:
            for abandoned in self._directory.glob(f"*{_ABANDONED}"):
                shutil.rmtree(abandoned, ignore_errors=True)
        for name in folders:
            if (folder := self._directory / name).exists():
                to = folder.rename(self._directory / f"{name}{_ABANDONED}")
                logging.getLogger("fsdp_jax").warning(
                    "The run goes on from step %d: a local step is kept as '%s', "
                    "until the run goes back again.",
                    after,
                    to,
                )

    def _remove_others(self) -> None:
        """Removes every folder except those of steps that a start could use."""
        newest = step_of(self._complete[-1]) if self._complete else None
        later = [f for f in self._elsewhere if (step_of(f) or 0) > (newest or -1)]
        kept = {*self._complete, *later}
        for folder in self._directory.iterdir():
            if step_of(folder.name) is not None and folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)


class _Writing:
    """Files that a background thread writes."""

    def __init__(self, folder: Path, files: Mapping[int, Bytes]):
        self.folder = folder
        self._failure: Exception | None = None
        # A daemon, so that a hanging disk does not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, args=(files,), daemon=True)
        self._thread.start()

    def wait(self, timeout_secs: float) -> None:
        """Waits until all files are written; raises the thread's error."""
        self._thread.join(timeout_secs)
        if self._thread.is_alive():
            raise TimeoutError(f"'{self.folder}' was not written in {timeout_secs:g} s")
        if self._failure is not None:
            raise self._failure

    def _run(self, files: Mapping[int, Bytes]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for writer, content in files.items():
                _write(self.folder / file_name(writer), writer, content)
            # A power failure can lose a renamed file whose directory is not flushed.
            for folder in (self.folder, self.folder.parent):
                write_through(folder)
        except Exception as error:
            self._failure = error


def _write(path: Path, writer: int, content: Bytes) -> None:
    """Writes a file atomically; a copy from a peer is verified first."""
    if writer != jax.process_index():
        parse(f"the copy of process {writer}", content, path).check()
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(content.data)
    write_through(part)
    part.rename(path)


def _run_id(persistent: str | os.PathLike[str]) -> str:
    return make_run_id(persistent, lambda: newest_run(persistent))
