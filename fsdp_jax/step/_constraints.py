"""Sharding constraints of a model's own, which have no meaning inside of a step.

A model may constrain its activations over a mesh of its own axes. In a step each rank
computes with its own rows: all axes but `tp` are manual, and jax refuses constraints
over them.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

_within_loss = contextvars.ContextVar("within_loss", default=False)


@contextmanager
def without_foreign_constraints(logged: set[str]) -> Iterator[None]:
    """Context in which `jax.lax.with_sharding_constraint` returns what it is given.

    Constraints over the axes that XLA partitions in a step, `tp`, hold. Each other one
    is logged. A function imported by `from jax.lax import ...` is not reached.

    Args:
      logged: Constraints that are logged already, and then those of this context too: a
        loss is traced several times, and its layers have the same ones.
    """
    original = jax.lax.with_sharding_constraint
    token = _within_loss.set(True)
    # Threads share the module, and not the variable.
    jax.lax.with_sharding_constraint = _ignoring(original, logged)
    try:
        yield
    finally:
        jax.lax.with_sharding_constraint = original
        _within_loss.reset(token)


def _ignoring(original: Callable[..., Any], logged: set[str]) -> Callable[..., Any]:
    def with_sharding_constraint(x, shardings, *args, **kwargs):
        if not _within_loss.get() or not any(map(_is_foreign, _leaves(shardings))):
            return original(x, shardings, *args, **kwargs)
        if (name := str(shardings)) not in logged:
            logged.add(name)
            logging.getLogger("fsdp_jax").warning(
                "Ignored in a step: with_sharding_constraint(..., %s). The plan "
                "decides where arrays are.",
                name,
            )
        return x

    return with_sharding_constraint


def _leaves(shardings: Any) -> list[Any]:
    return jax.tree.leaves(shardings, is_leaf=lambda n: isinstance(n, PartitionSpec))


def _is_foreign(sharding: Any) -> bool:
    """Returns whether a constraint is over axes that a step does not partition."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if isinstance(sharding, NamedSharding):
        if sharding.mesh.axis_names != mesh.axis_names:
            return True
    if not isinstance(spec, PartitionSpec):
        return False
    named = {
        axis
        for dim in spec
        if dim is not None and dim is not PartitionSpec.UNCONSTRAINED
        for axis in ((dim,) if isinstance(dim, str) else dim)
    }
    return any(kinds.get(axis, AxisType.Manual) == AxisType.Manual for axis in named)
