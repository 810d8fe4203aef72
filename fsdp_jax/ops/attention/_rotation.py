"""The ring of ranks: keys and values rotate, and which of them a rank sees."""

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

    def go_round(self, visit: Callable[..., Any], state: Any, keys: Any) -> Any:
        """Calls `visit(state, keys, step)` with each rank's keys in turn.

        `step` is the number of ranks that the keys have come; None for own keys.

        The keys of the next step are communicated while the current ones are used:

        | step | keys in use, on rank r | keys in flight |
        |---|---|---|
        | 0 | r (causal) | r - 1 |
        | 1 <= i < ranks - 1 | r - i | r - i - 1 |
        | ranks - 1 | r + 1 | none |
        """
        if self.ranks == 1:
            return visit(state, keys, None)
        # Sent before they are used, so that XLA can overlap the two.
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
        # Outside of the loop, since the last keys are not sent on.
        return visit(state, arriving, jnp.int32(self.ranks - 1))

    def rank(self) -> Int[Array, ""]:
        """Returns the index of this rank along the axis."""
        return lax.axis_index(self.axis) if self.ranks > 1 else jnp.int32(0)
