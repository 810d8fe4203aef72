"""Help text of a command: its docstring without attributes, wrapped to the terminal."""

from __future__ import annotations

import inspect
import shutil
import textwrap


def help_text(command: type) -> str:
    """Returns the text of a command's docstring before its attributes.

    Args:
      command: Dataclass of the command.
    """
    text, _, _ = inspect.cleandoc(command.__doc__ or "").partition("\nAttributes:")
    return wrapped(text.rstrip())


def wrapped(text: str) -> str:
    """Wraps paragraphs to the terminal, each line indented by a space.

    tyro joins lines that begin with a letter, and leaves what it joined as it is: the
    space keeps the lines.

    Args:
      text: Paragraphs; indented ones are left as they are.
    """
    width = shutil.get_terminal_size().columns - 1
    paragraphs = [
        paragraph
        if paragraph.startswith(" ")
        else textwrap.fill(
            " ".join(paragraph.split()),
            width,
            initial_indent=" ",
            subsequent_indent=" ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for paragraph in text.split("\n\n")
    ]
    return "\n\n".join(paragraphs)
