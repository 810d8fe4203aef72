"""Flips one bit of a state, on one device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fsdp_jax._tree import named_leaves
from fsdp_jax.sharding._padded import Padded


def flip_bit(state: Any, *, leaf: str, device: Any, bit: int, element: int = 0) -> Any:
    """Returns the state with a bit of one device's shard of a leaf flipped.

    Args:
        state: Tree of arrays.
        leaf: Name of the leaf, an array of 32 bits an element.
        device: Device; its replicas on others stay right.
        bit: Number of the bit in the element.
        element: Number of the element in the shard.
    """
    nodes = [
        _flipped(node, device, bit, element) if name == leaf else node
        for name, node in named_leaves(state)
    ]
    return jax.tree.structure(state, is_leaf=_is_padded).unflatten(nodes)


def _is_padded(node: Any) -> bool:
    return isinstance(node, Padded)


def _flipped(node: Any, device: Any, bit: int, element: int) -> Any:
    if isinstance(node, Padded):
        return Padded(_flipped(node.value, device, bit, element), node.shape, node.of)
    shards = []
    for shard in node.addressable_shards:
        data = shard.data
        if shard.device == device:
            words = np.array(data).reshape(-1).view(np.uint32)
            words[element % words.size] ^= np.uint32(1 << bit)
            data = jax.device_put(
                words.view(node.dtype).reshape(data.shape), shard.device
            )
        shards.append(data)
    return jax.make_array_from_single_device_arrays(node.shape, node.sharding, shards)
