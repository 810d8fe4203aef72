"""Distinguishes file system paths from URLs."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

# The scheme has at least two characters, since `C:/runs` is a path on Windows. One
# slash is enough, since `Path("s3://bucket/run")` is `s3:/bucket/run`.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def check_local(*paths: object, stores: Sequence[str] = ()) -> None:
    """Rejects URLs, which the file system would take for folders such as `s3:`.

    Args:
      paths: Paths as strings or `os.PathLike`; other values are ignored.
      stores: Schemes of the object stores that the caller takes, for the message.

    Raises:
      ValueError: If one is a URL.
    """
    taken = " and ".join(["a mounted file system", *(f"{s}://" for s in stores)])
    for path in paths:
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if isinstance(text, str) and (match := _URL.match(text)):
            raise ValueError(
                f"'{text}' is a URL with the scheme '{match[1]}', and only paths on "
                f"{taken} are supported. Mount the bucket, or give a plain "
                "path: '/data/run' for 'file:///data/run', an absolute one for a "
                f"folder called '{match[1]}:'."
            )
