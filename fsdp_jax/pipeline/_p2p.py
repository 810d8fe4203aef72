"""Communication between the stages of a pipeline, a ring over the mesh axis `pp`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from fsdp_jax._tp_shards import num_automatic_tp, on_tp_shards
from fsdp_jax._tree import PyTree


def pass_on(message: PyTree, stages: int, step: int) -> PyTree:
    """Sends a message to the stage `step` places further around the ring.

    Each rank of `tp` sends its own part of the message: a bare collective over another
    axis would gather over `tp` first and send tp times the bytes.

    Args:
      message: Tree of arrays, with the same shapes on all stages.
      stages: Number of stages.
      step: Distance around the ring: 1 for activations, -1 for their cotangents.

    Returns:
      The message of the stage `step` places back.
    """
    # The ring is closed: with virtual stages the last stage sends to the first. What
    # arrives where no chunk waits for it is never read.
    around = [(stage, (stage + step) % stages) for stage in range(stages)]

    def send(x):
        return lax.ppermute(x, "pp", around)

    with jax.named_scope("pass_on"):
        return jax.tree.map(lambda x: _send_shards(send, x), message)


def from_last(stages: int, tree: PyTree) -> PyTree:
    """Returns the last stage's values on all stages.

    PRNG keys are returned as they are: they are the same on all stages.
    """

    def take(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return lax.all_gather(x, "pp")[stages - 1]

    with jax.named_scope("from_last_stage"):
        return jax.tree.map(take, tree)


def _send_shards(send: Callable[[Array], Array], x: Array) -> Array:
    # Between layers activations are split over tp along tokens, the dim after the
    # batch's; where tp does not divide that dim, along the next one that it divides.
    tp = num_automatic_tp()
    dim = next((d for d in range(1, x.ndim) if x.shape[d] % tp == 0), None)
    return send(x) if tp == 1 or dim is None else on_tp_shards(send, x, dim)
