"""Batch validation and placement: rows over ranks, then over microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from fsdp_jax._tree import PyTree, matches, named_leaves, unmatched
from fsdp_jax.sharding._mesh import BATCH_AXES, num_devices
from fsdp_jax.sharding._plan import Plan

_MOST_SHOWN = 5
_NO_NUMBERS = frozenset("OSUMm")
"""Kinds of numpy dtypes that jax has none for: objects, strings and times."""


def check_batch(plan: Plan, batch: PyTree, num_microbatches: int) -> None:
    """Raises a `ValueError` unless all rows divide into ranks and microbatches.

    Args:
      plan: Plan from `fully_shard`.
      batch: Any pytree of arrays whose first dim is the global batch.
      num_microbatches: Number of microbatches per step.
    """
    leaves = named_leaves(batch)
    if not leaves:
        raise ValueError(
            f"The batch is a {type(batch).__name__} of 0 arrays: pass arrays with "
            "the rows of the batch as their first dim."
        )
    _check_arrays(leaves)
    scalars = [name or "batch" for name, leaf in leaves if leaf.ndim == 0]
    rows = {name or "batch": leaf.shape[0] for name, leaf in leaves if leaf.ndim}
    if scalars or not rows or len(set(rows.values())) > 1:
        shown = ", ".join(f"{name}: {n} rows" for name, n in rows.items())
        raise ValueError(
            "Every leaf of a batch has the rows of the batch as its first dim; got "
            f"{shown}{'; scalars: ' if scalars else ''}"
            f"{', '.join(scalars)}. Close over what has no rows, or broadcast it."
        )
    num_rows = next(iter(rows.values()))
    if num_rows == 0:
        raise ValueError("The batch has 0 rows, whose mean is no loss.")
    ranks = num_devices(plan.mesh, BATCH_AXES)
    # Rows are split over ranks first, and each rank's rows into microbatches.
    if num_rows % (ranks * num_microbatches):
        fitting = -(-num_rows // (ranks * num_microbatches)) * ranks * num_microbatches
        raise ValueError(
            f"A batch of {num_rows} rows does not divide into {ranks} data ranks x "
            f"{num_microbatches} microbatch(es). Use e.g. {fitting} rows."
        )
    if plan.mesh.shape["cp"] > 1:
        _check_sequences(plan, leaves)


def _check_arrays(leaves: Sequence[tuple[str, Any]]) -> None:
    """Raises a `ValueError` unless all leaves are arrays that jax can hold."""
    wrong = [
        f"{name or 'batch'}: {_shown(leaf)}"
        for name, leaf in leaves
        if not _is_array(leaf)
    ]
    if wrong:
        more = len(wrong) - _MOST_SHOWN
        raise ValueError(
            f"A batch holds arrays of rows; got {', '.join(wrong[:_MOST_SHOWN])}"
            f"{f' and {more} more' if more > 0 else ''}. Close over what is no row; "
            "make lists and the tensors of other libraries numpy arrays, as in "
            '{"x": numpy.asarray(x)}.'
        )


def _shown(leaf: Any) -> str:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        kind = type(leaf)
        return f"{kind.__module__}.{kind.__name__} of {leaf.dtype}"
    return repr(leaf)


def _check_sequences(plan: Plan, leaves: Sequence[tuple[str, Any]]) -> None:
    """Raises a `ValueError` unless each pattern names sequences that cp divides."""
    cp, dims = plan.mesh.shape["cp"], plan.config.context_parallel
    unused = unmatched(dims, [name for name, _ in leaves])
    wrong = [f"{pattern!r} matches no leaf of the batch" for pattern in unused]
    for pattern, dim in dims.items():
        for name, leaf in leaves:
            if matches(pattern, name) is None:
                continue
            shown = f"{pattern!r}: dim {dim} of {name or 'batch'} {tuple(leaf.shape)}"
            if not -leaf.ndim <= dim < leaf.ndim or dim % leaf.ndim == 0:
                wrong.append(f"{shown} is not there, or is the rows")
            elif leaf.shape[dim] % cp:
                wrong.append(f"{shown} does not divide")
    if wrong:
        raise ValueError(
            f"FSDPConfig(context_parallel=...) splits sequences over cp={cp}: "
            f"{'; '.join(wrong)}. Name the dim of each leaf that is the sequence, and "
            f"use sequences of a multiple of {2 * cp} tokens (see fsdp_jax.ops.zigzag)."
        )


def _is_array(leaf: Any) -> bool:
    kinds = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)
    # Dtypes of jax's own, as of keys, have no kind.
    kind = getattr(leaf.dtype, "kind", None) if isinstance(leaf, kinds) else "O"
    return kind not in _NO_NUMBERS


def place_batch(plan: Plan, batch: PyTree) -> PyTree:
    """Places each device's rows on it, unless they are there already.

    On CPU devices jax may alias a numpy array's memory, so a loader that reuses one
    buffer would change the batch during the running step: numpy arrays are copied
    there.

    With several processes each passes the whole batch, or the result of `global_batch`.
    """
    shardings = plan.batch_shardings(batch)
    if not plan.batch_sharding.is_fully_addressable:
        return jax.tree.map(_place_own, batch, shardings)
    if plan.mesh.devices.flat[0].platform == "cpu":
        batch = jax.tree.map(
            lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, batch
        )
    return jax.tree.map(_place_all, batch, shardings)


def _place_all(leaf: Any, sharding: NamedSharding) -> jax.Array:
    # Under a vmap `device_put` would split the mapped dim, which is none of the leaf's.
    if isinstance(leaf, Tracer):
        return jax.lax.with_sharding_constraint(leaf, sharding)
    return jax.device_put(leaf, sharding)


def _place_own(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Places rows of this process; device_put would compare those of all processes."""
    if isinstance(leaf, Tracer):
        return jax.lax.with_sharding_constraint(leaf, sharding)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    rows = np.asarray(leaf)
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


def split_microbatches(batch: PyTree, num_microbatches: int) -> PyTree:
    """Reshapes one device's rows `[rows, ...]` to `[microbatches, rows, ...]`."""
    return jax.tree.map(
        lambda x: x.reshape(
            num_microbatches, x.shape[0] // num_microbatches, *x.shape[1:]
        ),
        batch,
    )


def join_microbatches(rows: PyTree) -> PyTree:
    """Inverts `split_microbatches`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
