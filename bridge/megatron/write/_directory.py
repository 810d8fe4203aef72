"""Directory of a checkpoint that appears only when it is complete."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bridge.megatron.read._find import TRACKER_NAME


def check_path(path: Path) -> None:
    """Raises a `ValueError` if `path` exists and is not an empty directory."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(
            f"Cannot save to '{path}': it exists and is not an empty directory. Give "
            "a new name, or remove it first."
        )


@contextlib.contextmanager
def new_directory(path: Path, name: str) -> Iterator[Path]:
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
