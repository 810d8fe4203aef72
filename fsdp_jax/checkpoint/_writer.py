"""Identity of a process that writes to a directory of checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import time
from pathlib import Path

# Beyond any process id and number of renewals.
_MAX_NUMBER = 2**40


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
      renewals: Number of writes of the lease; 0 where its time tells of them.
    """

    id: str
    host: str
    machine: str
    pid: int
    began: str
    start: str
    renewals: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.start}"

    @property
    def is_dead(self) -> bool:
        """Whether it was a process of this machine that has ended."""
        return self.machine == machine() and self.began != _start_of(self.pid)

    def encode(self, renewals: int = 0) -> str:
        """Returns the content of a lease."""
        return json.dumps(dataclasses.asdict(self) | {"renewals": renewals})


def this_writer() -> Writer:
    """Returns the identity of this process, with an id for a new lease."""
    pid, start = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S %z")
    name, here = socket.gethostname(), machine()
    return Writer(secrets.token_hex(8), name, here, pid, _start_of(pid), start)


def decode_writer(content: bytes | None) -> Writer | None:
    """Returns the writer in a lease; None if no writer wrote it."""
    try:
        fields = json.loads(content or b"")
        writer = Writer(**fields)
    except (ValueError, TypeError, RecursionError):
        return None
    return writer if all(map(_is_typed, fields, fields.values())) else None


def _is_typed(name: str, value: object) -> bool:
    """Returns whether a field has the type and range that are written."""
    if name in ("pid", "renewals"):
        return type(value) is int and 0 <= value < _MAX_NUMBER
    return isinstance(value, str) and value.isprintable()


def refusal(directory: object, other: Writer | None) -> ValueError:
    """Returns the error of a second writer, which names the first."""
    name = "another process" if other is None else str(other)
    return ValueError(
        f"'{directory}' is being written by {name}: two writers would remove each "
        "other's saves. Wait until it ends, close its Checkpointer, or save to another "
        "directory. Reading is always allowed."
    )


def machine() -> str:
    """Returns an id of this boot of this machine and of its process namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _start_of(pid: int) -> str:
    """Returns the start of a process, which tells it from a later one of its id."""
    try:
        # The name in parentheses may hold spaces; the start is the 22nd field.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        return "" if Path("/proc").exists() else _start_elsewhere(pid)


def _start_elsewhere(pid: int) -> str:
    """Returns "running" for a process of a system without /proc; "" if it has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    return "running"
