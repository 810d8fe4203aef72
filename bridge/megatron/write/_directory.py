"""Directory of a checkpoint that appears only when it is complete."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from bridge._new_directory import new_directory
from bridge.megatron.read._find import TRACKER_NAME


@contextlib.contextmanager
def new_checkpoint(path: Path, name: str) -> Iterator[Path]:
    """Yields a temporary iteration directory; its parent becomes `path` on success.

    The tracker file is written last.
    """
    with new_directory(path) as root:
        (root / name).mkdir()
        yield root / name
        number = name.removeprefix("iter_")
        tracked = str(int(number)) if number.isdigit() else name
        (root / TRACKER_NAME).write_text(tracked)
