"""Steps of a run saved again with other contents, intact for everything but a chain."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

import fsdp_jax as fsdp
from fsdp_jax.checkpoint._multihost import exchange

Leaves = dict[str, Any]
"""Leaves of a state by name."""


def saved_again(
    path: Path, step: int, change: Callable[[Leaves], Leaves], **metadata: Any
) -> None:
    """Replaces the newest step by one that is intact, and has other contents.

    Args:
      path: Directory of the run.
      step: Number of the step.
      change: Returns the new leaves.
      metadata: Metadata to replace.
    """
    everywhere = NamedSharding(fsdp.make_mesh(), PartitionSpec())
    like = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
        for name, x in fsdp.checkpoint.load_shapes(path, step=step).items()
    }
    state = change(fsdp.load(path, like, step=step))
    found = fsdp.checkpoint.load_metadata(path, step=step) | metadata
    exchange(None)
    if jax.process_index() == 0:
        shutil.rmtree(path / str(step))
    exchange(None)
    named: Any = _Named(state, step)
    fsdp.save(path, named, metadata=found)


def moved(state: Leaves) -> Leaves:
    """Changes a norm by a thousandth."""
    name = next(name for name in state if name.endswith("norm.scale"))
    return state | {name: state[name] * 1.001}


def same(state: Leaves) -> Leaves:
    """Changes nothing."""
    return state


@jax.tree_util.register_pytree_with_keys_class
class _Named:
    """Leaves by name, with the number of the step that `save` asks for."""

    def __init__(self, leaves, step):
        self.leaves, self.step = leaves, step

    def tree_flatten_with_keys(self):
        keys = [jax.tree_util.DictKey(name) for name in self.leaves]
        pairs = list(zip(keys, self.leaves.values(), strict=True))
        return pairs, (tuple(self.leaves), self.step)

    @classmethod
    def tree_unflatten(cls, names_and_step, values):
        names, step = names_and_step
        return cls(dict(zip(names, values, strict=True)), step)
