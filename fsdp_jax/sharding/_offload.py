"""What of a state rests in the host's memory, and how a step reaches it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
from jax.sharding import Mesh

from fsdp_jax._tree import PyTree

HOST = "pinned_host"
"""The memory that a device copies from and to while it computes."""


@dataclasses.dataclass(frozen=True)
class Offload:
    """What rests in the host's pinned memory instead of the device's.

    A step copies it to the device parameter by parameter when it updates, and back: two
    parameters are on their way at a time. The numbers are the same. What it saves and
    what the copies cost `compile_for` says.

    Args:
      optimizer: The optimizer state.
      params: The main weights. What units gather, in the compute dtype or encoded, is
        made of them when a step begins and stays on the device until it is gathered
        last, so that it pays where that is narrower.
      min_elements: Arrays with fewer elements stay where they are.

    Source: FSDP2 `CPUOffloadPolicy` (there gradients move too, and the CPU updates).
    """

    optimizer: bool = True
    params: bool = False
    min_elements: int = 4096

    def __post_init__(self):
        """Refuses what would do nothing."""
        if not (self.optimizer or self.params):
            raise ValueError(
                "Offload(optimizer=False, params=False) offloads nothing: name one."
            )

    def moves(self, leaf: Any) -> bool:
        """Whether an array, or its mould, is large enough."""
        return leaf.size >= self.min_elements


def check_memory(mesh: Mesh) -> None:
    """Refuses to offload where devices reach no pinned memory of their host.

    Stand-ins, which are compiled for and hold nothing, say of no memory at all.
    """
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    check_kinds(device.platform, kinds)


def check_kinds(platform: str, kinds: Collection[str]) -> None:
    """Refuses memory kinds without pinned host memory; none at all is not known."""
    if kinds and HOST not in kinds:
        raise ValueError(
            f"FSDPConfig(offload=...) needs devices that reach '{HOST}' memory, and "
            f"those of '{platform}' have {', '.join(sorted(kinds))}. Drop it."
        )


def moulds_on_host(offload: Offload, moulds: PyTree) -> PyTree:
    """The moulds, those that are large enough with a sharding in the host's memory."""

    def to_host(leaf):
        if not offload.moves(leaf):
            return leaf
        sharding = leaf.sharding.with_memory_kind(HOST)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(to_host, moulds)


def on_device(tree: PyTree) -> PyTree:
    """The arrays in the device's memory, wherever they were; inside of jit."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), tree)
