"""A whole state in host memory for a while, so that another program has the devices."""

from __future__ import annotations

import jax

from fsdp_jax._tree import PyTree
from fsdp_jax.sharding._offload import HOST, check_kinds


def offload_state(state: PyTree) -> PyTree:
    """Moves every array of a state to pinned host memory, each shard to its own host.

    In reinforcement learning the rollout engine needs the memory of the devices between
    two updates. An `OffloadPolicy` is for state that is in host memory during the steps
    too.

    Args:
      state: Pytree of arrays, such as a `TrainState` or its `params`. Its arrays are
        deleted one by one, each when its copy is complete; what is in host memory
        already stays there.

    Returns:
      The same pytree, to the bit and with the same shardings, in host memory. Steps
      refuse it: call `onload_state` first.

    Raises:
      ValueError: If the devices cannot address pinned host memory.

    Examples:
      >>> params = fsdp.init_params(plan, jax.random.key(0))
      >>> away = fsdp.training.offload_state(params)
      >>> away["head"].sharding.memory_kind, params["head"].is_deleted()
      ('pinned_host', True)

    Source: verl `fsdp_utils.py::offload_fsdp_model_to_cpu`.
    """
    _check_memory(state)
    # Leaf after leaf, so that one array at a time is in both memories.
    return jax.tree.map(lambda x: _move(x, x.sharding.with_memory_kind(HOST)), state)


def onload_state(state: PyTree, like: PyTree) -> PyTree:
    """Moves the arrays of an offloaded state back to where a step expects them.

    Args:
      state: Result of `offload_state`. Its arrays are deleted one by one, each when its
        copy is complete.
      like: Pytree of the same structure with the shardings to move to:
        `abstract_state(plan, tx)`, or its `params`. What the plan's `OffloadPolicy`
        keeps in host memory stays there.

    Returns:
      The same pytree, to the bit, with the shardings of `like`.

    Raises:
      ValueError: If the two pytrees differ.

    Examples:
      >>> state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
      >>> like = fsdp.abstract_state(plan, tx)
      >>> away = fsdp.training.offload_state(state)
      >>> back = fsdp.training.onload_state(away, like)
      >>> back.params["head"].sharding.memory_kind
      'device'

    Source: verl `fsdp_utils.py::load_fsdp_model_to_gpu`.
    """
    trees = jax.tree.structure(state), jax.tree.structure(like)
    if trees[0] != trees[1]:
        raise ValueError(
            f"The state and `like` differ: {trees[0]} and {trees[1]}. Make `like` by "
            "abstract_state(plan, tx) of the state's own plan and optimizer."
        )
    return jax.tree.map(lambda x, there: _move(x, there.sharding), state, like)


def _move(leaf: jax.Array, target: jax.sharding.Sharding) -> jax.Array:
    if leaf.sharding == target:
        return leaf
    # `device_put` cannot donate across memory kinds.
    copy = jax.block_until_ready(jax.device_put(leaf, target))
    leaf.delete()
    return copy


def _check_memory(state: PyTree) -> None:
    device = next(iter(jax.tree.leaves(state)[0].sharding.device_set))
    check_kinds(device.platform, [m.kind for m in device.addressable_memories()])
