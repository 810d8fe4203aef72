"""Attention with heads split over `tp`, without collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from fsdp_jax.ops._tensor_parallel import ranks_to_split
from fsdp_jax.ops.attention._heads import check_heads, repeat_heads

Attention = Callable[..., Array]


def split_heads(attention: Attention, *, axis: str = "tp") -> Attention:
    """Wraps an attention function to run on each rank's heads alone.

    If sharding were left to XLA, whether heads stay local would depend on how they are
    reshaped, and XLA cannot partition cuDNN's kernel, a custom call. Here the call is
    manual over `axis`, so that neither scores nor heads cross it.

    Keys and values whose heads the ranks do not divide are repeated until they do; each
    rank then has those that its queries read. The gradients of copies are summed.

    Args:
      attention: `attention(query, key, value, *, scale, segment_ids, window, softcap,
        sinks)`, as `bridge.models.dot_product_attention`; query head `i` reads key head
        `i // (heads / kv_heads)`.
      axis: Mesh axis. Without one, or where it is manual, nothing changes.

    Returns:
      A function of the same arguments, with shapes global over `axis`. It raises a
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
        # A Python int stays static for the attention; a traced window enters the
        # shard_map as a replicated argument.
        (by_rank if isinstance(window, jax.Array) else static)["window"] = window
        ranks = ranks_to_split(axis)
        if ranks == 1:
            return attention(query, key, value, **static, **by_rank)
        check_heads(query.shape[2], ranks, axis)
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
            # Safe: split arguments are split in and out, and replicated ones have no
            # gradient that would need a reduction over the axis.
            check_vma=False,
        )(query, key, value, by_rank)

    return split


def _repeated(heads: Array, ranks: int) -> Array:
    """Repeats each head as often as needed for the ranks to divide them."""
    if heads.shape[2] % ranks == 0:
        return heads
    # Replicated, as their projections are: XLA would place them on some of the ranks
    # only, and send them to all others.
    heads = lax.with_sharding_constraint(heads, PartitionSpec(None, None, None))
    return repeat_heads(heads, ranks)
