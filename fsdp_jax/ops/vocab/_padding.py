"""Padding of a head whose vocabulary the ranks of `tp` do not divide."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from fsdp_jax.ops._tensor_parallel import ranks_to_split


def pad_vocabulary(
    kernel: Float[Array, "embed vocab"], *, axis: str = "tp"
) -> Float[Array, "embed padded"]:
    """Pads a head's vocabulary with zeros, so that `axis` can split its logits.

    Each rank then computes the logits of its part only. Pass `vocab_size=`, the size
    without padding, to the losses of this package, so that the padding does not count.

    Args:
      kernel: Weight of the head, shapes global over `axis`; replicated if the ranks do
        not divide its vocabulary.
      axis: Mesh axis. Without one, or where it is manual, nothing changes.

    Returns:
      The kernel, split over `axis` on its last dim; unchanged if the ranks divide it.

    Source: Megatron-LM `vocab_size_with_padding`, which pads what is trained and saved.
    """
    more = -kernel.shape[1] % ranks_to_split(axis)
    if not more:
        return kernel
    padded = jnp.pad(kernel, ((0, 0), (0, more)))
    return lax.with_sharding_constraint(padded, PartitionSpec(None, axis))
