"""Lease on a directory: at most one writer at a time; readers need none.

A second writer would remove the first one's save under way as the rest of a crash. The
lease is a file that names the writer, and whose time of modification is renewed. Ages
are differences of two such times, so that only the file system's clock counts. A writer
on this machine that has ended is seen at once, one elsewhere when it stops renewing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from fsdp_jax.checkpoint._multihost import together

NAME = "writer.json"
_RENEW_SECS = 5.0
_EXPIRES_SECS = 30.0
_LOOK_SECS = 0.5
# After the lease of a dead writer is replaced: another may have replaced it too.
_SETTLE_SECS = 0.2


@dataclasses.dataclass(frozen=True)
class Writer:
    """Content of a lease.

    Attributes:
      id: Random id of the lease.
      host: Name of the writer's machine.
      machine: Id of the machine's boot and of the process namespace; processes of equal
        ones see each other.
      pid: Process id.
      began: Start of the process in the machine's own units; "" if unknown.
      start: Time at which the lease was taken.
    """

    id: str
    host: str
    machine: str
    pid: int
    began: str
    start: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.start}"

    @property
    def is_dead(self) -> bool:
        """Whether it was a process of this machine that has ended."""
        return self.machine == _machine() and self.began != _began(self.pid)


class Lease:
    """Lease of this process, renewed by a thread until `release`."""

    def __init__(self, path: str | os.PathLike[str]):
        """Takes the lease of a directory.

        Args:
          path: Directory of the run; created if missing.

        Raises:
          ValueError: If another writer has it, or this process has it already.
        """
        self._file = Path(path).absolute() / NAME
        pid = os.getpid()
        start = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._writer = Writer(
            secrets.token_hex(8),
            socket.gethostname(),
            _machine(),
            pid,
            _began(pid),
            start,
        )
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
        self._file.parent.mkdir(parents=True, exist_ok=True)
        seen: float | None = None
        while not self._create():
            try:
                renewed = self._file.stat().st_mtime
            except FileNotFoundError:
                continue
            other = _read(self._file)
            dead = other is not None and other.is_dead
            if dead or self._age(renewed) > _EXPIRES_SECS:
                self._replace()
                return
            here = other is not None and other.machine == _machine()
            if here or (seen is not None and renewed != seen):
                raise ValueError(self._refusal(other))
            seen = renewed if seen is None else seen
            time.sleep(_LOOK_SECS)

    def _create(self) -> bool:
        """Creates the file; returns False if there is one."""
        try:
            file = os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(file, "w") as opened:
            opened.write(self._content())
        return True

    def _replace(self) -> None:
        """Replaces the lease of a dead writer; the last of several to do so wins."""
        part = self._part()
        part.write_text(self._content())
        part.replace(self._file)
        time.sleep(_SETTLE_SECS)
        found = _read(self._file)
        if found is None or found.id != self._writer.id:
            raise ValueError(self._refusal(found))

    def _age(self, renewed: float) -> float:
        """Returns the seconds since a time of the file system's clock."""
        part = self._part()
        part.touch()
        now = part.stat().st_mtime
        part.unlink()
        return now - renewed

    def _part(self) -> Path:
        return self._file.with_name(f"{NAME}.{self._writer.id}.part")

    def _content(self) -> str:
        return json.dumps(dataclasses.asdict(self._writer))

    def _refusal(self, other: Writer | None) -> str:
        name = "another process" if other is None else str(other)
        return (
            f"'{self._file.parent}' is being written by {name}: two writers would "
            "remove each other's saves. Wait until it ends, close its Checkpointer, or "
            "save to another directory. Reading is always allowed."
        )

    def _renew(self) -> None:
        while not self._over.wait(_RENEW_SECS):
            with contextlib.suppress(OSError):
                found = _read(self._file)
                if found is not None and found.id == self._writer.id:
                    os.utime(self._file)


def take_lease(path: str | os.PathLike[str]) -> Lease | None:
    """Takes the lease for all processes of the job, in process 0.

    Raises:
      ValueError: If another writer has it.
    """
    with together("Opening"):
        return Lease(path) if jax.process_index() == 0 else None


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
        return Writer(**json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _machine() -> str:
    """Returns an id of this boot of this machine and of its process namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _began(pid: int) -> str:
    """Returns the start of a process, which tells it from a later one of its id."""
    try:
        # The name in parentheses may hold spaces; the start is the 22nd field.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        return "" if Path("/proc").exists() else _began_elsewhere(pid)


def _began_elsewhere(pid: int) -> str:
    """Returns "running" for a process of a system without /proc; "" if it has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    return "running"
