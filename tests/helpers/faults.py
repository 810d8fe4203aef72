"""Faults within a step that none of its inputs shows, as of a device that errs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FORWARD, BACKWARD = 0, 1


def with_faults(
    x: jax.Array, batch: Mapping[str, Any], tables: np.ndarray, which: int
) -> jax.Array:
    """Returns activations with the faults of a case, which rows of one rank have.

    Right and wrong steps are the same program but for one number, and so sum alike.

    Args:
        x: Activations `[rows, features]`.
        batch: Batch with the number of the case and of the row, each `[rows]`.
        tables: What is added, `float32[tables, cases, rows, 2]`: to the activation, and
            to its gradient. Of a right step a table has zeros.
        which: Number of the table.
    """
    # Indexed by the batch, so that XLA cannot tell which table is read.
    cases = tables.shape[1]
    flat = jnp.asarray(tables.reshape(-1, *tables.shape[2:]))
    fault = flat[batch["case"] + which * cases, batch["row"]]
    forward, backward = (
        jnp.broadcast_to(fault[:, i : i + 1], x.shape) for i in (FORWARD, BACKWARD)
    )
    return _with_faulty_gradient(x + forward, backward)


@jax.custom_vjp
def _with_faulty_gradient(x, fault):
    del fault
    return x


_with_faulty_gradient.defvjp(
    lambda x, fault: (x, fault), lambda fault, g: (g + fault, jnp.zeros_like(fault))
)
