"""Names of XLA's options, read from its library."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import jaxlib


def option_names() -> frozenset[str]:
    """Returns all options of the XLA in the installed jaxlib.

    XLA offers no list of them, and what it prints of its flags is cut off. But it
    carries the description of the message that holds its options.
    """
    folder = Path(jaxlib.__file__).parent
    return frozenset().union(*map(_names_in, folder.glob("*.so")))


def _names_in(library: Path) -> set[str]:
    try:
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            # A field of a message: its tag, the name's length, the name, the next tag.
            found = re.findall(rb"\n.(xla_[a-z0-9_]+)\x18", content, flags=re.DOTALL)
            return {name.decode() for name in found}
    except (OSError, ValueError):  # Unreadable, or empty.
        return set()
