"""Validation of local paths: detects URLs that would be taken for folders."""

import os
import re

# A scheme has at least two characters, since `C:/runs` is a path on Windows. One
# slash is enough: `Path("s3://bucket/run")` normalizes to `s3:/bucket/run`.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def check_local(*paths: object) -> None:
    """Rejects URLs, which the file system would take for folders such as `s3:`.

    Args:
      paths: Paths as strings or `os.PathLike`; other values are skipped.

    Raises:
      ValueError: If a path is a URL.
    """
    for path in paths:
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if isinstance(text, str) and (match := _URL.match(text)):
            raise ValueError(
                f"'{text}' is a URL with the scheme '{match[1]}', and only paths on a "
                "mounted file system are supported. Mount the bucket, or give a plain "
                "path: '/data/run' for 'file:///data/run', an absolute one for a "
                f"folder called '{match[1]}:'."
            )
