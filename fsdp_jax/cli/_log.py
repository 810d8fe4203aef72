"""What is said to whoever watches: once, however many processes there are."""

from __future__ import annotations

import sys

import jax


def say(text: object) -> None:
    """Prints on stderr, in the first process alone. jax has started before."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr)
