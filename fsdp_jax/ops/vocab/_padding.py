"""A head whose vocabulary the ranks of `tp` do not divide."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from fsdp_jax.ops._tensor_parallel import ranks_to_split


def pad_vocabulary(
    kernel: Float[Array, "embed vocab"], *, axis: str = "tp"
) -> Float[Array, "embed padded"]:
    """Puts zeros behind a head's vocabulary, so that `axis` can split its logits.

    Each rank then makes the logits of its part alone. Pass the losses of this package
    `vocab_size=`, the vocabulary without the padding, so that it counts for nothing.

    Args:
      kernel: The head, shapes global over `axis`; whole on each rank if the ranks do
        not divide its vocabulary.
      axis: The mesh axis. Without one, or where it is manual, nothing changes.

    Returns:
      The kernel, split over `axis` on its last dim; as it came if that divides.

    Source: Megatron-LM `vocab_size_with_padding`, which pads what is trained and saved.
    """
    more = -kernel.shape[1] % ranks_to_split(axis)
    if not more:
        return kernel
    padded = jnp.pad(kernel, ((0, 0), (0, more)))
    return lax.with_sharding_constraint(padded, PartitionSpec(None, axis))
