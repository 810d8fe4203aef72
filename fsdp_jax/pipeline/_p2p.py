"""What goes around the ring of pipeline stages."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from fsdp_jax._tree import PyTree


def pass_on(message: PyTree, stages: int, step: int) -> PyTree:
    """Hands a message to the stage `step` further on, around the ring.

    Each rank of tp hands on a part of it: a bare collective over another axis would
    gather over tp first, and send tp times the bytes.
    """
    around = [(stage, (stage + step) % stages) for stage in range(stages)]

    def send(x):
        return lax.ppermute(x, "pp", around)

    with jax.named_scope("pass_on"):
        return jax.tree.map(lambda x: _at_tp_width(send, x), message)


def from_last(stages: int, tree: PyTree) -> PyTree:
    """What the last stage has, on all of them; keys are the same anyway."""

    def take(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return lax.all_gather(x, "pp")[stages - 1]

    with jax.named_scope("from_last_stage"):
        return jax.tree.map(take, tree)


def _at_tp_width(send: Callable[[Array], Array], x: Array) -> Array:
    mesh = jax.sharding.get_abstract_mesh()
    tp = 1 if "tp" in mesh.manual_axes else mesh.shape["tp"]
    # Between layers tokens are split over tp: the dim behind the batch's.
    dim = next((d for d in range(1, x.ndim) if x.shape[d] % tp == 0), None)
    if tp == 1 or dim is None:
        return send(x)
    spec = PartitionSpec(*(None,) * dim, "tp")
    return jax.shard_map(
        send, in_specs=spec, out_specs=spec, axis_names={"tp"}, check_vma=False
    )(x)
