"""Folders and files of an object store, with the methods of `pathlib.Path`.

Orbax takes any `epath.Path`. An object store has keys and no folders: a folder is what
keys have before a slash, or an empty object whose key ends with one.
"""

from __future__ import annotations

import contextlib
import fnmatch
import io
import os
from collections.abc import Iterator, Mapping
from typing import IO, Any

import tensorstore as ts
from etils import epath

from fsdp_jax.checkpoint._bucket import (
    ObjectStoreError,
    kvstore_spec,
    open_bucket,
    wait,
)

# Orbax's marker of a committed step, written last and removed first.
COMMIT_MARKER = "commit_success.txt"
_COPIES_AT_ONCE = 4
# TensorStore's code of a range that an object does not have.
_BEYOND_THE_END = "OUT_OF_RANGE"


@epath.register_path_cls
class StorePath(epath.Path):
    """Path in an object store.

    As `str` it is `/gs:bucket/key`: an absolute path, as Orbax demands, and none that
    Orbax would open with Google's client library, which need not be installed. In
    messages (`format`) it is the URL.
    """

    @classmethod
    def from_url(cls, scheme: str, rest: str) -> StorePath:
        """Returns the path of `scheme://rest`."""
        return cls(f"/{scheme}:{rest.strip('/')}")

    def __format__(self, spec: str) -> str:
        return format(self.url, spec)

    def __repr__(self) -> str:
        return f"StorePath({self.url!r})"

    @property
    def url(self) -> str:
        """`gs://bucket/key` or `s3://bucket/key`."""
        scheme, bucket = self._place
        return "/".join([f"{scheme}:/", bucket, *self.parts[2:]])

    @property
    def key(self) -> str:
        """Key of the object, without the bucket."""
        return "/".join(self.parts[2:])

    def kvstore_spec(self) -> dict[str, Any]:
        """Returns TensorStore's spec of this folder."""
        return kvstore_spec(*self._place, f"{self.key}/".lstrip("/"))

    def absolute(self) -> StorePath:
        """Returns the path itself."""
        return self

    def resolve(self, strict: bool = False) -> StorePath:
        """Returns the path itself."""
        return self

    # What is there.

    def exists(self) -> bool:
        """Returns whether it is a file or a folder."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Returns whether there is an object of this key."""
        return bool(self.key) and self.key in self._list(self.key, f"{self.key}\0")

    def is_dir(self) -> bool:
        """Returns whether keys begin with this one and a slash."""
        return bool(self.keys())

    def is_symlink(self) -> bool:
        """Returns False."""
        return False

    def keys(self) -> list[str]:
        """Returns what follows this folder's slash in all keys, in order."""
        prefix = f"{self.key}/".lstrip("/")
        found = self._list(prefix, _after(prefix))
        return [key.removeprefix(prefix) for key in found]

    def files(self) -> list[str]:
        """Returns the paths of all files below this folder, in order."""
        return [key for key in self.keys() if key and not key.endswith("/")]

    def iterdir(self) -> Iterator[StorePath]:
        """Yields the files and folders in this folder."""
        yield from (self / name for name in sorted(_first_parts(self.keys())))

    def glob(self, pattern: str) -> Iterator[StorePath]:
        """Yields files and folders; `*` stands for a part of one name."""
        wanted = pattern.split("/")
        names = {"/".join(key.split("/")[: len(wanted)]) for key in self.keys()}
        for name in sorted(names):
            parts = name.split("/")
            if len(parts) == len(wanted) and all(map(fnmatch.fnmatch, parts, wanted)):
                yield self / name

    # Content.

    def read_bytes(self) -> bytes:
        """Returns the content of the object."""
        return self.read_range(0, None)

    def read_range(self, start: int, stop: int | None) -> bytes:
        """Returns bytes of the object; `stop` is None for its end."""
        return self.await_range(self.start_range(start, stop))

    def start_range(self, start: int, stop: int | None) -> ts.Future:
        """Starts to read bytes of the object."""
        whole = start == 0 and stop is None
        span = None if whole else slice(start, stop)
        return self._bucket.read(self.key, byte_range=span)

    def await_range(self, reading: ts.Future) -> bytes:
        """Returns what `start_range` began to read."""
        found = wait(reading, self.url)
        if found.state != "value":
            raise FileNotFoundError(f"'{self.url}': there is no such object.")
        return found.value

    def of_other_size(self, sizes: Mapping[str, int]) -> set[str]:
        """Returns which files have another size; TensorStore does not tell sizes."""
        bytes_at = [
            (name, at, (self / name).start_range(at, at + 1))
            for name, size in sizes.items()
            for at in (size - 1, size)
            if at >= 0
        ]
        return {
            name
            for name, at, reading in bytes_at
            if _is_there(reading, f"{self / name}") != (at < sizes[name])
        }

    def open(
        self,
        mode: str = "r",
        encoding: str | None = None,
        errors: str | None = None,
        **kwargs: Any,
    ) -> IO[Any]:
        """Opens the object, whose content is in memory meanwhile."""
        if mode in ("r", "rb"):
            content = self.read_bytes()
            return io.BytesIO(content) if "b" in mode else io.StringIO(content.decode())
        if mode in ("w", "wb"):
            return _Writer(self) if "b" in mode else io.TextIOWrapper(_Writer(self))
        raise ValueError(f"'{self.url}' cannot be opened with mode {mode!r}.")

    def write_bytes(self, data: bytes) -> int:
        """Replaces the content of the object."""
        wait(self._bucket.write(self.key, bytes(data)), self.url)
        return len(data)

    def touch(self, mode: int = 0o666, exist_ok: bool = True) -> None:
        """Writes an empty object, if there is none."""
        if not self.is_file():
            self.write_bytes(b"")

    # Folders.

    def mkdir(
        self, mode: int | None = None, parents: bool = False, exist_ok: bool = False
    ) -> None:
        """Writes an empty object for the folder, which others then see."""
        if not self.is_dir():
            wait(self._bucket.write(f"{self.key}/", b""), self.url)
        elif not exist_ok:
            raise FileExistsError(f"'{self.url}' is there already.")

    def rmtree(self, missing_ok: bool = False) -> None:
        """Removes the folder; a step is none any more from the first moment on."""
        (self / COMMIT_MARKER).unlink()
        prefix = f"{self.key}/"
        keys = ts.KvStore.KeyRange(prefix, _after(prefix))
        wait(self._bucket.delete_range(keys), self.url)

    def rmdir(self) -> None:
        """Removes the object for an empty folder."""
        if self.files():
            raise OSError(f"'{self.url}' is not empty.")
        self.rmtree()

    def unlink(self, missing_ok: bool = True) -> None:
        """Removes the object."""
        wait(self._bucket.write(self.key, None), self.url)

    def rename(self, target: str | os.PathLike[str]) -> StorePath:
        """Copies a file or folder, marker last, and removes the original."""
        goal = type(self)(target)
        names = sorted(self.files(), key=lambda name: name == COMMIT_MARKER)
        if not names:
            return self.replace(goal)
        for start in range(0, len(names), _COPIES_AT_ONCE):
            batch = names[start : start + _COPIES_AT_ONCE]
            reads = [(name, (self / name).start_range(0, None)) for name in batch]
            for name, reading in reads:
                (goal / name).write_bytes((self / name).await_range(reading))
        self.rmtree()
        return goal

    def replace(self, target: str | os.PathLike[str]) -> StorePath:
        """Copies a file over another, and removes the original."""
        goal = type(self)(target)
        goal.write_bytes(self.read_bytes())
        self.unlink()
        return goal

    def copy(self, dst: str | os.PathLike[str], overwrite: bool = False) -> StorePath:
        """Copies a file."""
        goal = type(self)(dst)
        if goal.is_file() and not overwrite:
            raise FileExistsError(f"'{goal.url}' is there already.")
        goal.write_bytes(self.read_bytes())
        return goal

    # Versions, for conditional writes.

    def read_version(self) -> tuple[bytes | None, bytes]:
        """Returns content and version; None for no object, which has a version too."""
        found = wait(self._bucket.read(self.key), self.url)
        content = found.value if found.state == "value" else None
        return content, found.stamp.generation

    def write_if(self, data: bytes | None, version: bytes) -> bytes | None:
        """Writes or removes the object if it still has a version.

        Returns:
          Its new version; None if it has another, and nothing is written.
        """
        writing = self._bucket.write(self.key, data, if_equal=version)
        stamp = wait(writing, self.url)
        return stamp.generation or None

    @property
    def _place(self) -> tuple[str, str]:
        scheme, _, bucket = self.parts[1].partition(":")
        return scheme, bucket

    @property
    def _bucket(self) -> ts.KvStore:
        return open_bucket(*self._place)

    def _list(self, start: str, stop: str) -> list[str]:
        keys = ts.KvStore.KeyRange(start, stop)
        return [key.decode() for key in wait(self._bucket.list(keys), self.url)]


class _Writer(io.BytesIO):
    """File whose content becomes the object when it is closed."""

    def __init__(self, path: StorePath):
        super().__init__()
        self._path = path

    def close(self) -> None:
        if not self.closed:
            with contextlib.ExitStack() as stack:
                stack.callback(super().close)
                self._path.write_bytes(self.getvalue())


def _is_there(reading: ts.Future, what: str) -> bool:
    """Returns whether an object has the byte that is being read."""
    try:
        return bool(wait(reading, what).value)
    except ObjectStoreError as error:
        if _BEYOND_THE_END in str(error):
            return False
        raise


def _after(prefix: str) -> str:
    """Returns the first key behind all that begin with a prefix; "" for no end."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""


def _first_parts(keys: list[str]) -> set[str]:
    return {key.split("/")[0] for key in keys} - {""}
