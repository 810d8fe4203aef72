"""Regular files: whatever else bears a file's name is refused before it is opened."""

import stat
from pathlib import Path


def check_regular_file(path: Path) -> None:
    """Refuses what is no file, through links.

    Opening a pipe waits for a writer, for ever if there is none; a device may do
    anything at all. Links are followed: the hub's cache consists of them.

    Raises:
      FileNotFoundError: If nothing is there.
      ValueError: If it is a directory, a pipe, a socket, a device, or a link that
        leads nowhere.
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
