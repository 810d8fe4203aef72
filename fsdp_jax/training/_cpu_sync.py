"""On simulated devices one program at a time."""

from __future__ import annotations

from typing import TypeVar

import jax
from jax.sharding import Mesh

T = TypeVar("T")


def settle(mesh: Mesh, outputs: T) -> T:
    """Waits for the outputs of a program that ran on CPU devices; elsewhere does not.

    XLA for CPUs lets a device have 32 programs under way. What is dispatched beyond
    that waits for its turn in a thread of the very pool in which the collectives of the
    first program wait for each other, until none is left for the last of them: after 40
    seconds that ends the process (jax 0.10.2, a loop of 200 steps that looks at no
    result, 8 devices of 4 cores). GPUs are dispatched to in order, without such a pool.

    Args:
      mesh: Where it ran.
      outputs: What it returned.

    Returns:
      The same.
    """
    if all(device.platform == "cpu" for device in mesh.devices.flat):
        jax.block_until_ready(outputs)
    return outputs
