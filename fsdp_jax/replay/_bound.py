"""Which values of two states differ by more than a bound."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdp_jax._tree import PyTree
from fsdp_jax.replay._digest import stored_arrays
from fsdp_jax.sharding._ambient_mesh import own_mesh
from fsdp_jax.training._cpu_sync import settle

_SCALARS = ("loss", "grad_norm")


def leaves_beyond(a: PyTree, b: PyTree, rtol: float) -> tuple[str, ...]:
    """Returns the names of leaves that differ by more than the bound.

    Args:
      a: State.
      b: State with the same shardings.
      rtol: Largest difference of an element, relative to the largest finite magnitude
        of its leaf in `b`; numbers that are not floating-point must be equal.
    """
    arrays = {name: array for name, (array, _) in stored_arrays(a).items()}
    others = {name: array for name, (array, _) in stored_arrays(b).items()}
    mesh = next(iter(arrays.values())).sharding.mesh
    with own_mesh(mesh):
        found = settle(mesh, _program(mesh)(arrays, others, rtol))
    return tuple(name for name, is_beyond in found.items() if bool(is_beyond))


def scalars_beyond(a: PyTree, b: PyTree, rtol: float | None) -> tuple[str, ...]:
    """Returns which of loss and gradient norm differ between metrics.

    Args:
      a: Metrics of a step.
      b: Metrics of another one.
      rtol: As in `leaves_beyond`; None to compare bits.
    """
    pairs = [(name, np.asarray(a[name]), np.asarray(b[name])) for name in _SCALARS]
    return tuple(
        name
        for name, x, y in pairs
        if x.tobytes() != y.tobytes() and (rtol is None or bool(_is_beyond(x, y, rtol)))
    )


@functools.lru_cache(maxsize=8)
def _program(mesh: Mesh) -> Any:
    def beyond(arrays, others, rtol):
        return {name: _is_beyond(x, others[name], rtol) for name, x in arrays.items()}

    # Replicated, so that all processes decide alike.
    return jax.jit(beyond, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _is_beyond(a: Any, b: Any, rtol: Any) -> Any:
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return jnp.any(a != b)
    wide = jnp.promote_types(a.dtype, jnp.float32)
    a, b = jnp.asarray(a).astype(wide), jnp.asarray(b).astype(wide)
    largest = jnp.abs(jnp.where(jnp.isfinite(b), b, 0)).max(initial=0)
    # Not `>`: a comparison with NaN is false.
    is_within = (a == b) | (jnp.abs(a - b) <= rtol * largest)
    return ~jnp.all(is_within | (jnp.isnan(a) & jnp.isnan(b)))
