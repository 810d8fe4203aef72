"""Messages on stderr: once, however many processes there are."""

from __future__ import annotations

import sys

import jax

from fsdp_jax._streams import discard


def say(text: object) -> None:
    """Prints on stderr, in process 0 alone; starts jax's backend.

    Does nothing if the reader of stderr has gone.

    Args:
      text: Message.
    """
    if jax.process_index() > 0:
        return
    try:
        print(text, file=sys.stderr)
    except BrokenPipeError:
        discard(sys.stderr)
