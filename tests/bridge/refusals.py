"""Checkpoints to be broken, and what a refusal must and must not do."""

import os
from pathlib import Path

# Some files claim headers of 100 MB, and tensors far larger than any machine.
MAX_ALLOCATED_BYTES = 10**7
CANARY = "code from the file was run"


class Canary:
    """An object whose pickle makes a directory when it is loaded."""

    def __reduce__(self):
        return os.mkdir, (CANARY,)


def header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def listing(directory: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of everything below a directory."""
    return {
        str(path.relative_to(directory)): (stat.st_size, stat.st_mtime_ns)
        for path in sorted(directory.rglob("*"))
        for stat in [path.lstat()]
    }
