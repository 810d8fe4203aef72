"""An exponential moving average of the parameters, as optimizer state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def ema_of_params(decay: float) -> optax.GradientTransformation:
    """Averages the parameters after each update, and leaves the updates unchanged.

    The last part of a chain. The average is sharded, saved and resharded as the
    parameters are, in float32 or wider, since an average in 16 bits stands still. It
    begins with the first parameters; `optax.tree.get(opt_state, "ema")` returns it.

    Args:
      decay: Weight of the average so far, at least 0 and less than 1.

    Raises:
      ValueError: If `decay` is out of range; from its `update`, without parameters.

    Examples:
      >>> averaging = optax.chain(optax.adamw(1e-3), fsdp.optim.ema_of_params(0.999))
      >>> state = fsdp.init_state(plan, averaging, params)
      >>> average = optax.tree.get(state.opt_state, "ema")
      >>> average["head"].sharding == state.params["head"].sharding
      True
    """
    if not 0 <= decay < 1:
        raise ValueError(
            f"ema_of_params: decay={decay} must be at least 0 and less than 1."
        )

    def init(params: Any) -> optax.EmaState:
        return optax.EmaState(jnp.zeros((), jnp.int32), jax.tree.map(_wide, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                "ema_of_params averages parameters: pass `params` to update."
            )
        new = jax.tree.map(_wide, optax.apply_updates(params, updates))
        ema = optax.incremental_update(new, state.ema, 1 - decay)
        return updates, optax.EmaState(state.count + 1, ema)

    return optax.GradientTransformation(init, update)


def _wide(x: jax.Array) -> jax.Array:
    # A copy where the dtype is wide already: the state's buffers are donated.
    return jnp.array(x, jnp.promote_types(x.dtype, jnp.float32), copy=True)
