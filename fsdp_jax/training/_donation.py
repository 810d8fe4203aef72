"""States that a step has taken over, and that can no longer be read."""

from __future__ import annotations

from typing import Any

import jax
from jax import core

from fsdp_jax._tree import PyTree, named_leaves


def check_not_donated(tree: PyTree, what: str) -> None:
    """Raises a `ValueError` if arrays of a tree were donated to a step.

    jax says that an array is deleted, not why; jaxlib 0.10 ends the process where a
    program for several CPU devices is given a donated array (a segmentation fault).

    Args:
      tree: State or parameters; traced arrays are never deleted.
      what: What they are, for the message.
    """
    if not any(map(_is_deleted, jax.tree.leaves(tree))):
        return
    deleted = [
        name
        for name, leaf in named_leaves(tree)
        if any(map(_is_deleted, jax.tree.leaves(leaf)))
    ]
    raise ValueError(
        f"{len(deleted)} array(s) of {what} are deleted, such as {deleted[0]}: a step "
        "donates its state to the next. Use the state that it returned, `state, "
        "metrics = step(state, batch)`, and pass a copy to the step if the old one is "
        "needed: jax.tree.map(jax.numpy.copy, state)."
    )


def _is_deleted(array: Any) -> bool:
    is_array = isinstance(array, jax.Array) and not isinstance(array, core.Tracer)
    return is_array and array.is_deleted()
