"""A workaround for the deadlock of collectives on simulated CPU devices."""

from __future__ import annotations

from typing import TypeVar

import jax
from jax.sharding import Mesh

T = TypeVar("T")


def settle(mesh: Mesh, outputs: T) -> T:
    """Blocks until CPU outputs are ready: works around an XLA:CPU collective deadlock.

    XLA:CPU lets a device have 32 programs in flight. A program dispatched beyond that
    waits in a thread of the same pool in which the collectives of the first program
    wait for each other, until no thread is left for the last of them, and after 40
    seconds the process aborts (jax 0.10.2, a loop of 200 steps that reads no result, 8
    devices on 4 cores). GPU programs run in dispatch order without such a pool, so on
    other platforms this returns at once.

    Args:
      mesh: Device mesh that the program ran on.
      outputs: Outputs of the program.

    Returns:
      `outputs`, unchanged.
    """
    if all(device.platform == "cpu" for device in mesh.devices.flat):
        jax.block_until_ready(outputs)
    return outputs
