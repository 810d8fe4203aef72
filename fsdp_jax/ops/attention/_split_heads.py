"""Attention whose heads are split over `tp`: ranks mix their own, and send nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from fsdp_jax.ops._tensor_parallel import ranks_to_split

Attention = Callable[..., Array]


def split_heads(attention: Attention, *, axis: str = "tp") -> Attention:
    """Makes an attention run on each rank's heads alone.

    Left to XLA, whether heads stay where they are hangs on how they are reshaped; and
    cuDNN's kernel is a call into which it cannot see. Here the call is manual over
    `axis`, so that no scores and no heads can cross it.

    Keys and values whose heads the ranks do not divide are repeated until they do: each
    rank then has those that its queries read. The gradients of copies are summed.

    Args:
      attention: `attention(query, key, value, *, scale, segment_ids, window, softcap,
        sinks)`, as `bridge.models.dot_product_attention`; query head `i` reads key head
        `i // (heads / kv_heads)`.
      axis: The mesh axis. Without one, or where it is manual, nothing changes.

    Returns:
      The same function of the same arguments, shapes global over `axis`. It raises a
      `ValueError` if the ranks do not divide the query heads.
    """

    def split(
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads v_head_dim"],
        *,
        scale: float,
        segment_ids: Int[Array, "batch seq"] | None = None,
        window: Any = None,
        softcap: float | None = None,
        sinks: Float[Array, " heads"] | None = None,
    ) -> Float[Array, "batch seq heads v_head_dim"]:
        static: dict[str, Any] = {"scale": scale, "softcap": softcap}
        by_rank = {"segment_ids": segment_ids, "sinks": sinks}
        # The same on all ranks; a number is for the attention to see as one.
        (by_rank if isinstance(window, jax.Array) else static)["window"] = window
        ranks = ranks_to_split(axis)
        if ranks == 1:
            return attention(query, key, value, **static, **by_rank)
        _check(query.shape[2], ranks, axis)
        key, value = (_repeated(heads, ranks) for heads in (key, value))
        by_rank = {name: x for name, x in by_rank.items() if x is not None}
        heads = PartitionSpec(None, None, axis)
        whole, of_heads = PartitionSpec(), PartitionSpec(axis)
        specs = {name: of_heads if name == "sinks" else whole for name in by_rank}

        def local(query, key, value, by_rank):
            return attention(query, key, value, **static, **by_rank)

        return jax.shard_map(
            local,
            in_specs=(heads, heads, heads, specs),
            out_specs=heads,
            axis_names={axis},
            # What is split is split on all sides, and what is not has no gradient.
            check_vma=False,
        )(query, key, value, by_rank)

    return split


def _repeated(heads: Array, ranks: int) -> Array:
    """Each head as often as it takes for the ranks to divide them."""
    number = heads.shape[2]
    if number % ranks == 0:
        return heads
    # Whole on each rank, as their projections are: XLA would split these among some of
    # the ranks, and have all others ask for them.
    heads = lax.with_sharding_constraint(heads, PartitionSpec(None, None, None))
    return jnp.repeat(heads, math.lcm(number, ranks) // number, axis=2)


def _check(heads: int, ranks: int, axis: str) -> None:
    if heads % ranks:
        raise ValueError(
            f"Attention of {heads} heads does not divide over {ranks} ranks of "
            f"'{axis}'. Use fewer ranks, a divisor of {heads}."
        )
