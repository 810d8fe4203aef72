"""Loops that gather their few units before they begin.

A loop may run the same units in each iteration, as one over time runs the cells of a
recurrent network. Their gathers depend on no iteration, so jax and XLA take them out of
the loop. They leave the reduction of the gradients there: a step would reduce them in
each iteration. Here the loop gets the unsharded weights, and one gradient of each comes
out of it:

    before                              after
    c = scan[n] w c                     v = fsdp_unshard w
      body: v = fsdp_unshard w          c = scan[n] v c
            c = f(v, c)                   body: c = f(v, c)

The weights are not kept for backward, which gathers them again. More units than may be
unsharded at once are gathered in each iteration, see `hold_gathers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from fsdp_jax.step._flat_trace import has_effects
from fsdp_jax.step._lifted_gathers import (
    NotLiftedError,
    gathers_ahead,
    gathers_in_loops,
    lift_gathers,
    num_entries,
)
from fsdp_jax.step._loop_equation import Loop
from fsdp_jax.step._remat_policy import Resharding


def gathered_once(
    loop: Loop, is_shard: Sequence[bool], most: int
) -> Callable[..., Sequence[Any]] | None:
    """Returns a function of a loop's operands that gathers before the loop.

    Args:
      loop: Loop that runs the same units in each iteration.
      is_shard: Whether each of its constants is a leaf of a shard.
      most: Number of units that may be unsharded together.

    Returns:
      The function; None if the loop has more units, or units in loops of its body.

    Raises:
      NotLiftedError: If the loop's gathers cannot be taken out of its body.
    """
    body = loop.eqn.params["jaxpr"]
    has_loops = gathers_ahead(body.jaxpr) or gathers_in_loops(body.jaxpr)
    if not 0 < num_entries(body.jaxpr) <= most or has_loops:
        return None
    num_others = len(loop.eqn.invars) - len(is_shard)
    lifted = lift_gathers(body, [*is_shard, *[False] * num_others])
    if lifted is None:
        return None
    if has_effects(loop.eqn):
        raise NotLiftedError("it has side effects, such as jax.debug.print")
    if any(at is not None for at in lifted.passed):
        raise NotLiftedError("it returns a shard")
    how = {name: loop.eqn.params[name] for name in ("length", "reverse", "unroll")}

    def looped(shards, others, carry, xs):
        values = lifted.gather(*(shards[at] for at in lifted.read))
        # The loop adds up their gradients, in as many bits as these have.
        wide = [_widened(value) for value in values]

        def run(carry, x):
            own = [w.astype(v.dtype) for w, v in zip(wide, values, strict=True)]
            made = lifted.rest(*own, *others, *carry, *x)
            return made[: len(carry)], made[len(carry) :]

        return lax.scan(run, carry, xs, **how)

    resharded = jax.checkpoint(looped, policy=Resharding(None))

    def run(*operands):
        consts, carry, xs = loop.split(operands)
        pairs = list(zip(consts, is_shard, strict=True))
        shards = [v for v, is_own in pairs if is_own]
        others = [v for v, is_own in pairs if not is_own]
        carry, ys = resharded(shards, others, carry, xs)
        return [*carry, *ys]

    return run


def _widened(value: Array) -> Array:
    """Casts a floating-point array of fewer bits than 32 to float32."""
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    return value.astype(jnp.promote_types(value.dtype, jnp.float32))
