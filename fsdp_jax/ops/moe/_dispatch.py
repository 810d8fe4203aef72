"""Dispatch of tokens to experts on other ranks, and combination of the results."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fsdp_jax._scopes import EXPERT_DISPATCH, rows_of_experts
from fsdp_jax.ops.moe._all_to_all import Exchange, segments_of
from fsdp_jax.ops.moe._combine import combine
from fsdp_jax.ops.moe._gather_rows import inverse_of
from fsdp_jax.ops.moe._node_route import node_route
from fsdp_jax.ops.moe._nodes import nodes_of, within_limit
from fsdp_jax.ops.moe._routes import CapacityRoute, RaggedRoute, Rows, Tokens
from fsdp_jax.ops.moe._send import check_dispatch_dtype, send

RunExperts = Callable[[Rows, Int[Array, " experts"] | np.ndarray], Rows]


def expert_parallel_dispatch(
    run: RunExperts,
    x: Tokens,
    experts: Int[Array, "tokens chosen"],
    weights: Float[Array, "tokens chosen"],
    num_experts: int,
    *,
    axis: str = "ep",
    dispatch_dtype: DTypeLike | None = None,
) -> tuple[Tokens, Int[Array, " tokens"]]:
    """Sends every token to all experts it chose, on any rank; none is dropped.

    Use it as `dispatch` of `bridge.models.Decoder` or in any other model, in a loss
    under a plan with `FSDPConfig(expert_parallel=...)`. Rank i on `axis` has the i-th
    part of the experts. Buffers and computation have the worst-case size, in which one
    rank receives all tokens of all ranks: with many ranks prefer
    `expert_capacity_dispatch`, whose rows are bounded.

    Where `axis` is not a manual axis, or has size 1, all experts are on this device.

    Args:
      run: `run(rows, group_sizes)`; computes rows sorted by expert, the first
        `group_sizes[0]` of which belong to this rank's first expert, and so on. Rows
        beyond the sum of sizes are zeros, and their results are not read.
      x: Tokens of this rank.
      experts: Indices of the experts that each token chose; from `num_experts` on, they
        are of none, and add nothing.
      weights: Weight of each chosen expert's output.
      num_experts: Number of experts on all ranks.
      axis: Mesh axis over which experts are split.
      dispatch_dtype: float8_e4m3fn to send tokens, and in backward the gradients of the
        sums, to the experts in a byte an element, with a power-of-two scale for each
        128; one rank rounds them too. Outputs, and gradients of tokens, come back in
        their own dtype, in which None sends all.

    Returns:
      The weighted sums, added in float32 and rounded once; and the number of dropped
      experts per token, all zeros.

    Raises:
      ValueError: If the ranks do not divide the experts, or tokens are not sent in
        `dispatch_dtype`.

    Examples:
      >>> import functools
      >>> import jax.numpy as jnp
      >>> from fsdp_jax.ops import expert_parallel_dispatch
      >>> dispatch = functools.partial(
      ...     expert_parallel_dispatch, dispatch_dtype=jnp.float8_e4m3fn
      ... )
      >>> x, chosen = jnp.asarray([[100.0], [101.0]]), jnp.asarray([[0], [1]])
      >>> y, _ = dispatch(lambda rows, _: rows, x, chosen, jnp.ones((2, 1)), 2)
      >>> y[:, 0].tolist()  # Of e4m3, 96 and 104 are next to both.
      [96.0, 104.0]

    Source: Megatron-LM `token_dispatcher.py::MoEAlltoAllTokenDispatcher` (dropless);
      DeepSeek-V3 (arXiv:2412.19437), section 3.3.3, for what is sent in float8.
    """
    dispatch_dtype = check_dispatch_dtype(dispatch_dtype)
    ranks, local = _ranks_and_experts(axis, num_experts)
    tokens, chosen = experts.shape
    flat = experts.reshape(-1).astype(jnp.int32)
    order = jnp.argsort(flat)  # stable: equal experts keep the tokens' order
    counts = jnp.bincount(flat, length=num_experts).astype(jnp.int32)
    with jax.named_scope(EXPERT_DISPATCH):
        if ranks == 1:
            # Choices of none come last. Nobody gets them, as with several ranks.
            none, inverse = len(flat), inverse_of(order)
            order = jnp.where(jnp.arange(none) < counts.sum(), order, none)
            inverse = jnp.where(flat < num_experts, inverse, none)
            route = RaggedRoute(order, inverse, None, None, None, None, chosen, None)
        else:
            most = tokens * min(chosen, local)
            form = Exchange(axis, len(flat), most, ranks * most)
            route, counts = _ragged_route(
                order, counts.reshape(ranks, local), chosen, form
            )
        rows = run(send(route, x, dispatch_dtype), counts)
        y = combine(route, rows, weights, dispatch_dtype).astype(x.dtype)
    return y, jnp.zeros(tokens, jnp.int32)


def _ragged_route(
    order: Int[Array, " rows"],
    counts: Int[Array, "ranks local"],
    chosen: int,
    form: Exchange,
) -> tuple[RaggedRoute, Int[Array, " local"]]:
    """Returns the route to the experts of all ranks, and the rows of each one here."""
    table = _of_all_ranks(counts, form.axis)
    there, back = segments_of(table.sum(-1), lax.axis_index(form.axis))
    mine = lax.dynamic_index_in_dim(
        table, lax.axis_index(form.axis), axis=1, keepdims=False
    )
    by_expert = _by_expert(mine, form.room)
    inverse, by_source = inverse_of(order), inverse_of(by_expert)
    route = RaggedRoute(order, inverse, there, back, by_expert, by_source, chosen, form)
    return route, mine.sum(0)


def _of_all_ranks(
    counts: Int[Array, "ranks local"], axis: str
) -> Int[Array, "ranks ranks local"]:
    """Returns the number of rows from each rank to each expert of each rank.

    An all-reduce instead of an all-gather: XLA would combine an all-gather with those
    of weights over the same axis, and tokens would wait for the weights prefetched for
    the next layer.
    """
    table = jnp.zeros((len(counts), *counts.shape), counts.dtype)
    return lax.psum(table.at[lax.axis_index(axis)].set(counts), axis)


def _by_expert(counts: Int[Array, "ranks local"], room: int) -> Int[Array, " room"]:
    """Returns the order by expert of rows sorted by source, then by expert."""
    ends = jnp.cumsum(counts.reshape(-1))
    place = jnp.arange(room, dtype=jnp.int32)
    group = jnp.searchsorted(ends, place, side="right", method="compare_all")
    local = counts.shape[-1]
    return jnp.argsort(jnp.where(place < ends[-1], group % local, local))


def expert_capacity_dispatch(
    run: RunExperts,
    x: Tokens,
    experts: Int[Array, "tokens chosen"],
    weights: Float[Array, "tokens chosen"],
    num_experts: int,
    *,
    capacity_factor: float,
    ranks_per_node: int | None = None,
    nodes_per_token: int | None = None,
    axis: str = "ep",
    dispatch_dtype: DTypeLike | None = None,
) -> tuple[Tokens, Int[Array, " tokens"]]:
    """Sends tokens to experts with a fixed capacity per expert and source rank.

    The sizes of communication and computation do not depend on the routing. From each
    rank an expert takes the first `capacity_factor * tokens * chosen / num_experts`
    tokens, rounded up; all first choices precede all second ones. A dropped token gets
    no output from that expert, as with weight 0, and is counted. Use it as
    `functools.partial(expert_capacity_dispatch, capacity_factor=1.25)`.

    With `ranks_per_node` the network carries one copy of a token to each node with an
    expert that it chose, and one sum back; copies for several experts are made in the
    node, over its faster links. The slots of experts are the same, and the sum of each
    node is rounded to the dtype of the outputs. It uses `lax.ragged_all_to_all` between
    nodes; XLA of jax 0.12 compiles that to an all-gather over the nodes, slower as
    modelled than without, where that of jax 0.10.2 sends the rows alone.

    Args:
      run: `run(rows, group_sizes)`, as in `expert_parallel_dispatch`; the group sizes
        are a numpy array, all equal.
      x: Tokens of this rank.
      experts: Indices of the experts that each token chose, as in
        `expert_parallel_dispatch`; those of none are not counted as dropped.
      weights: Weight of each chosen expert's output; not renormalized for dropped ones.
      num_experts: Number of experts on all ranks.
      capacity_factor: Capacity relative to an even load; 1 is exactly enough if all
        experts are chosen equally often.
      ranks_per_node: Number of consecutive ranks on `axis` in a node, e.g. 8 on nodes
        of 8 GPUs if `cp` and `tp` have size 1; None to send tokens directly.
      nodes_per_token: Maximum number of nodes that a token is sent to; it bounds the
        buffers. Pass what the router keeps to, such as its limit of groups if each is
        on one node; a token's choices on further nodes are dropped and counted. None
        for no limit.
      axis: Mesh axis over which experts are split.
      dispatch_dtype: Dtype in which tokens are sent to the experts, as in
        `expert_parallel_dispatch`.

    Returns:
      The weighted sums, and the number of dropped experts per token.

    Raises:
      ValueError: If the ranks do not divide the experts, `ranks_per_node` does not
        divide the ranks, the factor or `nodes_per_token` is not positive, or tokens
        are not sent in `dispatch_dtype`.

    Source: GShard (arXiv:2006.16668), algorithm 1; Switch Transformer
      (arXiv:2101.03961), section 2.2; one copy a node: DeepSeek-V3
      (arXiv:2412.19437), sections 2.1.2 and 3.2.2.
    """
    if not 0 < capacity_factor < math.inf:
        raise ValueError(f"capacity_factor={capacity_factor} must be more than 0.")
    dispatch_dtype = check_dispatch_dtype(dispatch_dtype)
    ranks, local = _ranks_and_experts(axis, num_experts)
    tokens, chosen = experts.shape
    capacity = min(tokens, math.ceil(capacity_factor * tokens * chosen / num_experts))
    wanted = (experts < num_experts).T.reshape(-1)
    nodes = nodes_of(axis, ranks, ranks_per_node, nodes_per_token)
    if nodes is not None and nodes.most < min(chosen, nodes.count):
        on_node = local * nodes.size
        allowed = within_limit(experts // on_node, nodes.most)
        experts = jnp.where(allowed, experts, num_experts)
    slot, kept = _slots(experts, num_experts, capacity)
    places = num_experts * capacity
    # Flattened choice-major, so that all first choices precede all second ones.
    item = jnp.full(places, slot.size, jnp.int32)
    item = item.at[slot].set(jnp.arange(slot.size, dtype=jnp.int32), mode="drop")
    direct = CapacityRoute(item, slot, chosen, ranks, local, capacity, axis)
    with jax.named_scope(EXPERT_DISPATCH):
        # A numpy array, so that `run` can see statically that all groups are equal.
        sizes = np.full(local, ranks * capacity, np.int32)
        route = direct if nodes is None else node_route(direct, nodes)
        sent = send(route, x, dispatch_dtype)
        with jax.named_scope(rows_of_experts(slot.size, ranks * local * capacity)):
            rows = run(sent, sizes)
        y = combine(route, rows, weights, dispatch_dtype).astype(x.dtype)
    dropped = (wanted & ~kept).reshape(chosen, tokens).sum(0).astype(jnp.int32)
    return y, dropped


def _slots(
    experts: Int[Array, "tokens chosen"], num_experts: int, capacity: int
) -> tuple[Array, Array]:
    """Returns the slot of each choice, choice-major, and whether it fits.

    A choice of expert `num_experts` gets no slot.
    """
    flat = experts.T.reshape(-1).astype(jnp.int32)
    counts = jnp.bincount(flat, length=num_experts)
    place = inverse_of(jnp.argsort(flat))
    position = place - jnp.take(jnp.cumsum(counts) - counts, flat)
    kept = (position < capacity) & (flat < num_experts)
    slot = jnp.where(kept, flat * capacity + position, num_experts * capacity)
    return slot.astype(jnp.int32), kept


def _ranks_and_experts(axis: str, num_experts: int) -> tuple[int, int]:
    """Returns the number of ranks that share the experts, and of experts on each."""
    mesh = jax.sharding.get_abstract_mesh()
    ranks = mesh.shape[axis] if axis in mesh.manual_axes else 1
    if num_experts % ranks:
        raise ValueError(
            f"{num_experts} experts cannot be split over {ranks} ranks on '{axis}'. "
            "Use a number of ranks that divides them."
        )
    return ranks, num_experts // ranks
