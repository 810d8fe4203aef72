"""Distinguishes file system paths from URLs, and from what a shell expands."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

# The scheme has at least two characters, since `C:/runs` is a path on Windows. One
# slash is enough, since `Path("s3://bucket/run")` is `s3:/bucket/run`.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_HOME = re.compile(r"~([/\\]|$)")


def check_local(*paths: object, stores: Sequence[str] = ()) -> None:
    """Rejects URLs and `~`, which the file system would take for folders.

    Args:
      paths: Paths as strings or `os.PathLike`; other values are ignored.
      stores: Schemes of the object stores that the caller takes, for the message.

    Raises:
      ValueError: If one is a URL, or begins with `~`.
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
        if isinstance(text, str) and _HOME.match(text):
            raise ValueError(
                f"'{text}' begins with '~', which a shell expands and this does not: "
                f"give '{os.path.expanduser(text)}', or './{text}' for a folder called "
                "'~'."
            )
