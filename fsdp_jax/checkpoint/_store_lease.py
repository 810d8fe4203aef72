"""Lease on a directory in an object store: at most one writer at a time.

The lease is an object that names the writer. Every write of it demands the version
that was seen before, so that of several writers one wins. A renewal changes the
version: a writer elsewhere is dead if it does not change for some time, which is
measured by the clock of this process alone.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

from fsdp_jax.checkpoint._paths import as_path
from fsdp_jax.checkpoint._store_path import StorePath
from fsdp_jax.checkpoint._writer import (
    decode_writer,
    machine,
    refusal,
    this_writer,
)

NAME = "writer.json"
_RENEW_SECS = 5.0
_EXPIRES_SECS = 30.0
_LOOK_SECS = 0.5


class StoreLease:
    """Lease of this process, renewed by a thread until `release`."""

    def __init__(self, path: str | os.PathLike[str]):
        """Takes the lease of a directory.

        Args:
          path: Directory of the run in an object store.

        Raises:
          ValueError: If another writer has it, or this process has it already.
          ObjectStoreError: If the store does not answer.
        """
        self._file: StorePath = as_path(path) / NAME
        self._writer = this_writer()
        self._renewals = 0
        self._lock = threading.Lock()
        self._version = self._take()
        self._over = threading.Event()
        threading.Thread(target=self._renew, daemon=True).start()

    def check(self) -> None:
        """Raises a `ValueError` if another writer has taken the lease meanwhile."""
        with self._lock:
            if not self._is_mine():
                self._version = self._take()

    def release(self) -> None:
        """Gives the lease back once, if it is still this one's."""
        if self._over.is_set():
            return
        self._over.set()
        with self._lock, contextlib.suppress(OSError):
            if self._is_mine():
                self._file.unlink()

    def _take(self) -> bytes:
        """Takes the lease, and returns its version."""
        seen, end = None, 0.0
        while True:
            content, version = self._file.read_version()
            other = decode_writer(content)
            if other is not None and other.id == self._writer.id:
                return version
            is_dead = content is None or (other is not None and other.is_dead)
            if is_dead or (version == seen and time.monotonic() >= end):
                made = self._file.write_if(self._content(), version)
                if made is not None:
                    return made
                continue
            here = other is not None and other.machine == machine()
            if here or (seen is not None and version != seen):
                raise refusal(self._file.parent, other)
            if seen is None:
                seen, end = version, time.monotonic() + _EXPIRES_SECS
            time.sleep(_LOOK_SECS)

    def _is_mine(self) -> bool:
        """Returns whether the lease is this one's, and notes its version if so."""
        content, version = self._file.read_version()
        found = decode_writer(content)
        if found is None or found.id != self._writer.id:
            return False
        self._version = version
        return True

    def _content(self) -> bytes:
        """Returns another content each time: a version may be a digest of it."""
        self._renewals += 1
        return self._writer.encode(renewals=self._renewals).encode()

    def _renew(self) -> None:
        while not self._over.wait(_RENEW_SECS):
            with self._lock, contextlib.suppress(OSError):
                if self._over.is_set():
                    return
                made = self._file.write_if(self._content(), self._version)
                # A write whose answer was lost is repeated, and then comes too late.
                if made is None:
                    self._is_mine()
                else:
                    self._version = made
