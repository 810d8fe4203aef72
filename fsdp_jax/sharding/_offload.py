"""Host offload: which state is stored in host memory, and how a step reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
from jax.sharding import Mesh

from fsdp_jax._option_types import check_options
from fsdp_jax._tree import PyTree

HOST = "pinned_host"
"""Memory kind that devices copy from and to while they compute."""


@dataclasses.dataclass(frozen=True)
class OffloadPolicy:
    """State that is stored in the host's pinned memory instead of device memory.

    The update copies it to the device and back parameter by parameter, with two
    parameters in transfer at a time. The numbers are the same; only on CPUs the
    last bit may differ in stacks that the update reads by layer (`stream_params`).
    `estimate_step` estimates the memory that it saves and the time of the copies.

    Args:
      optimizer: Offload the optimizer state.
      params: Offload the main weights. The shards that units gather, in the compute
        dtype or quantized, are made of them when a step begins and stay on the device
        until they are gathered last, so this pays where that dtype is narrower.
      min_elements: Number of elements below which an array stays in device memory.
      optimizer_fraction: Largest fraction of the bytes of the optimizer state's large
        arrays to offload, above 0 and at most 1. They are taken in the order of the
        state, first moments before second ones, each that still fits.
      stream_params: Leave the main weights of stacked units on the host during a step
        too, and copy the slice of one unit at a time, ahead of its gather, in forward
        and again in backward: weights of `FSDPConfig(prefetch=) + 1` units are on the
        device. The copies are in the stored dtype, twice a microbatch. The update
        copies them and their moments a layer at a time too, if the optimizer computes
        each layer of a stack by itself. All other offloaded weights are copied when a
        step begins. Needs `params=True`.

    Raises:
      ValueError: If neither `optimizer` nor `params` is set, `stream_params` is set
        without `params`, or `optimizer_fraction` is out of range or has no effect.

    Examples:
      >>> config = fsdp.FSDPConfig(offload=fsdp.OffloadPolicy(min_elements=0))
      >>> plan = fsdp.fully_shard(make_model, mesh, config=config)
      >>> moments = fsdp.abstract_state(plan, tx).opt_state[0].mu
      >>> moments["head"].sharding.memory_kind
      'pinned_host'

    Source: FSDP2 `CPUOffloadPolicy` (there gradients move too, and the CPU updates);
      Megatron-LM `optimizer_config.py::optimizer_offload_fraction`.
    """

    optimizer: bool = True
    params: bool = False
    min_elements: int = 4096
    optimizer_fraction: float = 1.0
    stream_params: bool = False

    def __post_init__(self):
        """Refuses options that offload nothing."""
        check_options(self)
        if not (self.optimizer or self.params):
            raise ValueError(
                "OffloadPolicy(optimizer=False, params=False) offloads nothing: "
                "name one."
            )
        if self.stream_params and not self.params:
            raise ValueError(
                "OffloadPolicy(stream_params=True, params=False) streams weights that "
                "are stored on the device: set params=True."
            )
        fraction = self.optimizer_fraction
        if not 0 < fraction <= 1 or (fraction < 1 and not self.optimizer):
            raise ValueError(
                f"OffloadPolicy(optimizer={self.optimizer}, optimizer_fraction="
                f"{fraction}) takes a fraction above 0 and at most 1 of an optimizer "
                "state that is offloaded."
            )

    def moves(self, leaf: Any) -> bool:
        """Returns whether an array, concrete or abstract, is large enough."""
        return leaf.size >= self.min_elements


def check_memory(mesh: Mesh) -> None:
    """Raises if the devices cannot address pinned memory of their host.

    Abstract devices, which are compiled for and hold nothing, report no memory and
    pass.
    """
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    check_kinds(device.platform, kinds)


def check_kinds(platform: str, kinds: Collection[str]) -> None:
    """Raises if pinned host memory is not among memory kinds; an empty list passes."""
    if kinds and HOST not in kinds:
        raise ValueError(
            f"FSDPConfig(offload=...) needs devices that reach '{HOST}' memory, and "
            f"those of '{platform}' have {', '.join(sorted(kinds))}. Drop it."
        )


def params_on_host(offload: OffloadPolicy | None, params: PyTree) -> PyTree:
    """Returns whether each parameter, concrete or abstract, is offloaded."""
    return jax.tree.map(
        lambda leaf: bool(offload and offload.params and offload.moves(leaf)), params
    )


def optimizer_on_host(offload: OffloadPolicy | None, opt_state: PyTree) -> PyTree:
    """Returns whether each array of an optimizer state is offloaded."""
    leaves, treedef = jax.tree.flatten(opt_state)
    if not (offload and offload.optimizer):
        return treedef.unflatten([False] * len(leaves))
    large = [leaf.size * leaf.dtype.itemsize * offload.moves(leaf) for leaf in leaves]
    left = offload.optimizer_fraction * sum(large)
    flags = []
    for nbytes in large:
        flags.append(0 < nbytes <= left)
        left -= nbytes * flags[-1]
    return treedef.unflatten(flags)


def abstract_on_host(flags: PyTree, abstracts: PyTree) -> PyTree:
    """Returns the abstract arrays, those with a flag with a sharding on the host."""

    def to_host(is_there, leaf):
        if not is_there:
            return leaf
        sharding = leaf.sharding.with_memory_kind(HOST)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(to_host, flags, abstracts)


def on_device(tree: PyTree) -> PyTree:
    """Copies the arrays to device memory, from any memory kind; inside of jit."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), tree)
