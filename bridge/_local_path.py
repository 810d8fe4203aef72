"""Validation of local paths: detects what would be taken for folders."""

import os
import re

# A scheme has at least two characters, since `C:/runs` is a path on Windows. One
# slash is enough: `Path("s3://bucket/run")` normalizes to `s3:/bucket/run`.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_HOME = re.compile(r"~([/\\]|$)")


def check_local(*paths: object) -> None:
    """Rejects URLs and `~`, which the file system would take for folders.

    Args:
      paths: Paths as strings or `os.PathLike`; other values are skipped.

    Raises:
      ValueError: If a path is a URL, or begins with `~`.
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
        if isinstance(text, str) and _HOME.match(text):
            raise ValueError(
                f"'{text}' begins with '~', which a shell expands and this does not: "
                f"give '{os.path.expanduser(text)}', or './{text}' for a folder called "
                "'~'."
            )
