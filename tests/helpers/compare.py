"""How far two trees are apart, leaf by leaf."""

from __future__ import annotations

import jax
import numpy as np

from fsdp_jax._tree import named_leaves


def host(tree):
    """The tree as numpy arrays on the host."""
    return jax.tree.map(lambda x: np.asarray(x), tree)


def relative_errors(got, want, *, without: tuple[str, ...] = ()) -> dict[str, float]:
    """||got - want|| / ||want|| for each leaf but those that end in `without`."""
    errors = {}
    for (name, a), (_, b) in zip(named_leaves(got), named_leaves(want), strict=True):
        if not name.endswith(without or ("\0",)):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            errors[name] = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    assert errors
    return errors


def worst(got, want, *, without: tuple[str, ...] = ()) -> float:
    """The largest of `relative_errors`."""
    return max(relative_errors(got, want, without=without).values())
