"""What `fsdp-jax` and each of its commands say of themselves, as Markdown."""

from __future__ import annotations

import contextlib
import io
import os
import re
import textwrap
from unittest import mock

from fsdp_jax.cli import main

WIDTH = 78
"""Columns that a block of text has on the site."""


def command_names() -> list[str]:
    """The commands, in the order of the help."""
    found = re.search(r"\{([\w,-]+)\}", help_of())
    assert found, "fsdp-jax --help lists its commands in braces"
    return found[1].split(",")


def help_of(*command: str) -> str:
    """What `fsdp-jax COMMAND --help` prints, without colours and 78 columns wide."""
    plain = {"NO_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "dumb"}
    with mock.patch.dict(os.environ, plain), io.StringIO() as out:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main([*command, "--help"])
        lines = [line.rstrip() for line in out.getvalue().splitlines()]
    # What a command says of itself is one line a paragraph.
    return "\n".join(_folded(line) for line in lines).strip()


def _folded(line: str) -> str:
    if line.startswith((" ", "usage:")):
        return line
    return textwrap.fill(line, WIDTH, break_on_hyphens=False)


def reference() -> str:
    """A section for each command."""
    names = command_names()
    return "\n\n".join(f"## {n}\n\n```text\n{help_of(n)}\n```" for n in names)
