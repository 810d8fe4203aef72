"""Updates of the matrices that a device owns, without those of zeros.

All devices run one program, whose stacks have room for as many matrices on each. Where
they do not divide a stack, its last slot is of zeros on some: a branch passes it over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from fsdp_jax._tree import PyTree, leaf_name
from fsdp_jax.optim._matrix_stack import StackLayout

Stacks = Mapping[str, Array]


def update_owned(
    layouts: Mapping[str, StackLayout],
    tx: optax.GradientTransformation,
    updates: Stacks,
    state: PyTree,
    params: Stacks | None,
) -> tuple[dict[str, Array], PyTree]:
    """Runs `tx.update` on each device for the matrices that it owns.

    Args:
      layouts: Layout of each stack, by name.
      tx: Transformation that updates each matrix by itself.
      updates: Stacks of gradients.
      state: State of `tx` for all stacks.
      params: Stacks of parameters; None passes none.

    Returns:
      Stacks of updates, and the new state.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(state)
    leaves = {_key(path): leaf for path, leaf in pairs}
    # What belongs to no matrix, such as a count: XLA drops the rest of this update.
    _, whole = tx.update(updates, state, params)
    new_leaves = dict(zip(leaves, jax.tree.leaves(whole), strict=True))
    new_updates = {}
    for name, layout in layouts.items():
        part = _Part.of(name, layout, tx, updates[name])
        held = {key: leaves[key] for key in part.keys}
        old = None if params is None else params[name]
        new_updates[name], new = _update_stack(part, tx, updates[name], held, old)
        new_leaves |= new
    return new_updates, treedef.unflatten(new_leaves.values())


@dataclasses.dataclass(frozen=True)
class _Part:
    """Part of the state that belongs to one stack, and what belongs to all.

    Attributes:
      name: Name of the stack.
      layout: Its layout.
      treedef: Structure of the state of `tx` for this stack alone.
      keys: Path of each of its leaves, in order.
      by_slot: Paths of the leaves that have an entry per matrix.
    """

    name: str
    layout: StackLayout
    treedef: Any
    keys: tuple[str, ...]
    by_slot: frozenset[str]

    @classmethod
    def of(
        cls,
        name: str,
        layout: StackLayout,
        tx: optax.GradientTransformation,
        stack: Array,
    ) -> _Part:
        pairs, treedef = jax.tree_util.tree_flatten_with_path(
            jax.eval_shape(tx.init, {name: stack})
        )
        by_slot = {
            _key(path)
            for path, leaf in pairs
            if leaf_name(path[-1:]) == name and leaf.shape[:1] == (layout.num_matrices,)
        }
        keys = tuple(_key(path) for path, _ in pairs)
        return cls(name, layout, treedef, keys, frozenset(by_slot))


def _update_stack(
    part: _Part,
    tx: optax.GradientTransformation,
    updates: Array,
    state: dict[str, Array],
    params: Array | None,
) -> tuple[Array, dict[str, Array]]:
    layout = part.layout
    slot_state = {key: state[key] for key in part.keys if key in part.by_slot}
    shared = {key: state[key] for key in part.keys if key not in part.by_slot}

    def local(stacks, shared):
        def run(slots: slice) -> tuple[Array, dict[str, Array]]:
            own, held, old = jax.tree.map(lambda stack: stack[slots], stacks)
            tree = part.treedef.unflatten({**shared, **held}[k] for k in part.keys)
            old = None if old is None else {part.name: old}
            out, new = tx.update({part.name: own}, tree, old)
            found = dict(zip(part.keys, jax.tree.leaves(new), strict=True))
            (update,) = jax.tree.leaves(out)
            return update, {key: found[key] for key in held}

        return _over_slots(layout, run)

    spec = layout.spec
    run = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(spec, PartitionSpec()),
        out_specs=(spec, spec),
        check_vma=False,
    )
    return run((updates, slot_state, params), shared)


def _over_slots(layout: StackLayout, run: Callable[[slice], PyTree]) -> PyTree:
    """Runs the slots that are full on every device, then the last where it is."""
    num_slots, num_full = layout.num_slots, min(layout.num_owned, default=0)
    if num_full == num_slots:
        return run(slice(None))
    last = slice(num_full, num_slots)
    shapes = jax.eval_shape(lambda: run(last))
    is_full = jnp.asarray(np.asarray(layout.num_owned) > num_full)
    of_last = lax.cond(
        is_full[lax.axis_index(layout.owners)],
        lambda: run(last),
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
    )
    if not num_full:
        return of_last
    of_full = run(slice(num_full))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), of_full, of_last)


def _key(path: Sequence[Any]) -> str:
    return jax.tree_util.keystr(tuple(path))
