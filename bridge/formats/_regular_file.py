"""Check that a path is a regular file, before it is opened."""

import stat
from pathlib import Path


def check_regular_file(path: Path) -> None:
    """Rejects anything that is not a regular file; follows links.

    Opening a pipe blocks until a writer opens it, and opening a device may have any
    side effect. Links are followed because the hub's cache consists of them.

    Raises:
      FileNotFoundError: If the path does not exist.
      ValueError: If it is a directory, pipe, socket, device or broken link.
    """
    if path.is_symlink() and not path.exists():
        raise ValueError(f"'{path}' is a link that leads nowhere.")
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "directory" if stat.S_ISDIR(mode) else "pipe, socket or device"
        raise ValueError(
            f"'{path}' is a {kind} in place of a file. Remove it, and download the "
            "file again."
        )
