"""Ring of ranks: rotates keys and values so that each rank visits those of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class Ring:
    """Ring of ranks along a mesh axis.

    Attributes:
      axis: Mesh axis.
      ranks: Number of devices along it.
    """

    axis: str
    ranks: int

    def send(self, tree: Any) -> Any:
        """Sends a tree to the next rank and returns that of the previous one."""
        to = [(rank, (rank + 1) % self.ranks) for rank in range(self.ranks)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, to), tree)

    def rotate(self, visit: Callable[..., Any], state: Any, keys: Any) -> Any:
        """Calls `visit(state, keys, step)` with each rank's keys in turn.

        The keys of the next step are communicated while the current ones are used:

        | step | keys in use, on rank r | keys in flight |
        |---|---|---|
        | None (0) | r | r - 1 |
        | 1 <= i < ranks - 1 | r - i | r - i - 1 |
        | ranks - 1 | r + 1 | none |

        Args:
          visit: Function of state, keys and step that returns the next state. The step
            is the number of times the keys were sent, traced; None for own keys.
          state: Pytree of arrays.
          keys: Keys and values of this rank, a pytree of arrays.

        Returns:
          State after the visits of all ranks' keys.
        """
        if self.ranks == 1:
            return visit(state, keys, None)
        # Sent before they are used, so that XLA overlaps communication and `visit`.
        arriving = self.send(keys)
        state = visit(state, keys, None)

        def body(carry, step):
            state, keys = carry
            arriving = self.send(keys)
            state = visit(state, keys, step)
            return (state, arriving), None

        steps = jnp.arange(1, self.ranks - 1, dtype=jnp.int32)
        if self.ranks > 2:
            (state, arriving), _ = lax.scan(body, (state, arriving), steps)
        # Outside of the loop: the last keys are not sent on.
        return visit(state, arriving, jnp.int32(self.ranks - 1))

    def rank(self) -> Int[Array, ""]:
        """Returns the index of this rank along the axis."""
        return lax.axis_index(self.axis) if self.ranks > 1 else jnp.int32(0)
