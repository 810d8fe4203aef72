"""Lease on a directory: at most one writer at a time; readers need none.

A second writer would remove the first one's save under way as the rest of a crash. The
lease is a file that names the writer, and whose time of modification is renewed. Ages
are differences of two such times, so that only the file system's clock counts. A writer
on this machine that has ended is seen at once, one elsewhere when it stops renewing.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from fsdp_jax.checkpoint._multihost import together
from fsdp_jax.checkpoint._paths import as_path, is_local
from fsdp_jax.checkpoint._store_lease import NAME, StoreLease
from fsdp_jax.checkpoint._writer import (
    Writer,
    decode_writer,
    machine,
    refusal,
    this_writer,
)

_RENEW_SECS = 5.0
_EXPIRES_SECS = 30.0
_LOOK_SECS = 0.5
# Beyond any lease.
_MAX_BYTES = 2**16
# After the lease of a dead writer is replaced: another may have replaced it too.
_SETTLE_SECS = 0.2


class Lease:
    """Lease of this process, renewed by a thread until `release`."""

    def __init__(self, path: str | os.PathLike[str]):
        """Takes the lease of a directory.

        Args:
          path: Directory of the run; created if missing.

        Raises:
          ValueError: If another writer has it, or this process has it already; if the
            path, or a part of it, is a file.
        """
        self._file = Path(path).absolute() / NAME
        self._writer = this_writer()
        self._take()
        self._over = threading.Event()
        threading.Thread(target=self._renew, daemon=True).start()

    def check(self) -> None:
        """Raises a `ValueError` if another writer has taken the lease meanwhile."""
        found = _read(self._file)
        if found is None or found.id != self._writer.id:
            self._take()  # Not there if the directory was made anew.

    def release(self) -> None:
        """Gives the lease back, if it is still this one's."""
        self._over.set()
        found = _read(self._file)
        if found is not None and found.id == self._writer.id:
            self._file.unlink(missing_ok=True)

    def _take(self) -> None:
        folder = self._file.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(
                f"Cannot save in '{folder}': it or a part of its path is a file. Save "
                "to another directory."
            ) from error
        seen: float | None = None
        while not self._create():
            try:
                renewed = self._file.lstat().st_mtime
            except FileNotFoundError:
                continue
            if self._file.is_dir():
                raise ValueError(
                    f"'{self._file}' is a folder, but the lease of the directory is a "
                    "file of this name: remove or rename the folder."
                )
            other = _read(self._file)
            dead = other is not None and other.is_dead
            if dead or self._age(renewed) > _EXPIRES_SECS:
                self._replace()
                return
            here = other is not None and other.machine == machine()
            if here or (seen is not None and renewed != seen):
                raise refusal(self._file.parent, other)
            seen = renewed if seen is None else seen
            time.sleep(_LOOK_SECS)

    def _create(self) -> bool:
        """Creates the file; returns False if there is one."""
        try:
            file = os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            with os.fdopen(file, "w") as opened:
                opened.write(self._writer.encode())
        except OSError:
            # Of a full disk: a lease without a writer would have the next one wait.
            self._file.unlink(missing_ok=True)
            raise
        return True

    def _replace(self) -> None:
        """Replaces the lease of a dead writer; the last of several to do so wins."""
        part = self._part()
        part.write_text(self._writer.encode())
        part.replace(self._file)
        time.sleep(_SETTLE_SECS)
        found = _read(self._file)
        if found is None or found.id != self._writer.id:
            raise refusal(self._file.parent, found)

    def _age(self, renewed: float) -> float:
        """Returns the seconds since a time of the file system's clock."""
        part = self._part()
        part.touch()
        now = part.stat().st_mtime
        part.unlink()
        return now - renewed

    def _part(self) -> Path:
        return self._file.with_name(f"{NAME}.{self._writer.id}.part")

    def _renew(self) -> None:
        while not self._over.wait(_RENEW_SECS):
            with contextlib.suppress(OSError):
                found = _read(self._file)
                if found is not None and found.id == self._writer.id:
                    os.utime(self._file)


def take_lease(path: str | os.PathLike[str]) -> Lease | StoreLease | None:
    """Takes the lease for all processes of the job, in process 0.

    Raises:
      ValueError: If another writer has it.
    """
    with together("Opening"):
        if jax.process_index() > 0:
            return None
        directory = as_path(path)
        return Lease(directory) if is_local(directory) else StoreLease(directory)


@contextlib.contextmanager
def leased(path: str | os.PathLike[str]) -> Iterator[None]:
    """Holds the lease of a directory during the body; all processes call it alike."""
    lease = take_lease(path)
    try:
        yield
    finally:
        if lease is not None:
            lease.release()


def _read(file: Path) -> Writer | None:
    """Returns the content of a lease; None if there is none, or it is not readable."""
    try:
        if file.is_symlink() or not file.is_file():  # opening a pipe would wait
            return None
        with file.open("rb") as opened:
            return decode_writer(opened.read(_MAX_BYTES))
    except OSError:
        return None
