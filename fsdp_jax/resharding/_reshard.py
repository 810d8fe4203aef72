"""Moves a state from one plan to another, without a disk, one leaf after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import optax

from fsdp_jax._tree import PyTree, named_leaves
from fsdp_jax.checkpoint._leaf_names import Leaf, parts, rebuild
from fsdp_jax.optim._matrix_stack import MatrixStack
from fsdp_jax.resharding._moves import LeafMove, Moves, move_of
from fsdp_jax.resharding._transfer import copied, transfer
from fsdp_jax.sharding._ambient_mesh import check_plan, no_mesh
from fsdp_jax.sharding._offload import HOST
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.training._loss_scale import LossScale
from fsdp_jax.training._state import TrainState, abstract_state

CHUNK_BYTES = 64 << 20
"""Bytes of a piece: large enough for the bandwidth of a link, and little memory."""


def reshard(
    state: PyTree,
    plan: Plan,
    tx: optax.GradientTransformation | None = None,
    *,
    donate: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> PyTree:
    """Moves a state to another plan, on the same devices or others, to the bit.

    Leaves are identified as in a checkpoint, by name and logical shape, so that padding
    and the stacks of `layer_wise` may differ. Pieces go from device to device, and no
    device gathers an array. In a job of several processes all of them must call this.

    Args:
      state: `TrainState`, or parameters, such as `state.params`.
      plan: Plan to move to, of the same model and dtypes.
      tx: Optimizer made for `plan`; None for parameters alone.
      donate: Whether each leaf of `state` is deleted as soon as its copy is complete,
        so that there is one state in memory. If this raises halfway, none is complete.
      chunk_bytes: Bytes of a piece, at most. A device has two of them beside its parts
        of the leaves: one that it cuts and one that it receives.

    Returns:
      State as from `init_state(plan, tx, ...)`; parameters as `plan.params`.

    Raises:
      ValueError: If the state does not fit the plan; lists all leaves that do not,
        before anything moves.
      RuntimeError: If the bytes received differ from those planned, which is a bug.

    Examples:
      >>> state = fsdp.init_state(plan, tx, params)
      >>> smaller_mesh = fsdp.make_mesh(devices=jax.devices()[:4])
      >>> other = fsdp.fully_shard(make_model, smaller_mesh, [fsdp.Stacked("layers")])
      >>> state = fsdp.reshard(state, other, tx, donate=True)
      >>> state.params["head"].sharding.num_devices
      4

    Source: verl and NeMo-RL reshard between trainer and rollout engine, weights alone.
    """
    moves = plan_moves(state, plan, tx, donate=donate, chunk_bytes=chunk_bytes)
    by_name = {leaf.name: leaf for leaf in moves.leaves}
    sources = _Sources(state, donate)
    counts: list[int] = []

    def moved(name: str, node: Any) -> dict[str, Any]:
        values = {}
        for part in parts(name, node):
            with sources.lent(part) as array:
                values[part], count = _move(array, by_name[part])
                counts.append(count)
        return values

    with no_mesh():
        new = rebuild(_target(state, plan, tx), moved)
    _audit(moves, sum(counts))
    return new


def plan_moves(
    state: PyTree,
    plan: Plan,
    tx: optax.GradientTransformation | None = None,
    *,
    donate: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> Moves:
    """Plans the transfers of `reshard` without running them.

    Args:
      state: State or parameters, as for `reshard`, or abstract ones, such as
        `abstract_state(plan, tx)` of the plan to move from.
      plan: Plan to move to.
      tx: Optimizer made for `plan`; None for parameters alone.
      donate: Whether each leaf is deleted as soon as its copy is complete.
      chunk_bytes: Bytes of a piece, at most.

    Returns:
      Pieces of each leaf with their devices and bytes, in the order of transfer.

    Raises:
      ValueError: If the state does not fit the plan; lists all leaves that do not.

    Examples:
      >>> moves = fsdp.resharding.plan_moves(fsdp.abstract_state(plan, tx), plan, tx)
      >>> moves.bytes_moved
      0
    """
    check_plan(plan, "reshard")
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes={chunk_bytes} must be at least 1.")
    before, after = _abstract(state), _abstract(_target(state, plan, tx))
    _check(before, after)
    leaves = (move_of(n, before[n], leaf, chunk_bytes) for n, leaf in after.items())
    return Moves(tuple(leaves), chunk_bytes, donate)


def _target(
    state: PyTree, plan: Plan, tx: optax.GradientTransformation | None
) -> PyTree:
    """Returns the abstract state, or the abstract parameters, to move to."""
    if not isinstance(state, TrainState):
        return plan.params
    if tx is None:
        raise ValueError(
            "reshard(state, plan) of a TrainState needs tx, the optimizer made for "
            "`plan`: its state moves too. Pass tx, or move state.params alone."
        )
    has_scale = state.loss_scale is not None
    return abstract_state(plan, tx, LossScale() if has_scale else None)


def _abstract(tree: PyTree) -> dict[str, Leaf]:
    """Returns the abstract leaves by name, without splitting stacks."""
    found = {}
    for name, node in named_leaves(tree):
        is_stack = isinstance(node, MatrixStack)
        found |= parts(name, node.abstract() if is_stack else node)
    return found


def _check(before: dict[str, Leaf], after: dict[str, Leaf]) -> None:
    """Raises one `ValueError` that lists all leaves that do not fit the plan."""
    problems = [f"missing: {name}" for name in after if name not in before]
    problems += [f"unexpected: {name}" for name in before if name not in after]
    problems += [
        f"{name}: {_kind(before[name])}, planned {_kind(leaf)}"
        for name, leaf in after.items()
        if name in before and _kind(before[name]) != _kind(leaf)
    ]
    problems += [
        f"{name}: not on devices"
        for name, leaf in before.items()
        if getattr(leaf.value, "sharding", None) is None
    ]
    if problems:
        raise ValueError(
            f"The state does not fit the plan in {len(problems)} place(s):\n  "
            + "\n  ".join(problems)
            + "\nMake the plan from the same model, with the same dtypes, and tx from "
            "the same optimizer."
        )


def _kind(leaf: Leaf) -> str:
    return f"{leaf.value.dtype}{list(leaf.shape)}{leaf.impl or ''}"


class _Sources:
    """Arrays of a state by name; a `MatrixStack` is split when its first part is lent.

    Args:
      state: State to move.
      donate: Whether arrays of the state are deleted after they are lent.
    """

    def __init__(self, state: PyTree, donate: bool):
        self._donate = donate
        self._nodes = dict(named_leaves(state))
        self._node_of = {
            part: name
            for name, node in self._nodes.items()
            for part in parts(
                name, node.abstract() if isinstance(node, MatrixStack) else node
            )
        }
        self._members: dict[str, jax.Array] = {}

    @contextlib.contextmanager
    def lent(self, part: str) -> Iterator[jax.Array]:
        """Lends the array of a leaf, and deletes it afterwards if it was donated."""
        name = self._node_of[part]
        node = self._nodes[name]
        if not isinstance(node, MatrixStack):
            yield parts(name, node)[part].value
            if self._donate:
                jax.tree.map(lambda array: array.delete(), node)
            return
        if part not in self._members:
            members = {n: leaf.value for n, leaf in parts(name, node).items()}
            self._members |= jax.block_until_ready(members)
            if self._donate:
                node.value.delete()
        # A copy made by `parts`: freed in any case; the stack itself only if donated.
        array = self._members.pop(part)
        yield array
        array.delete()


def _move(array: jax.Array, move: LeafMove) -> tuple[jax.Array, int]:
    """Returns the array where the plan stores it, and the bytes received here."""
    target = move.after.sharding
    assert target is not None
    is_on_host = target.memory_kind == HOST
    like = jax.ShapeDtypeStruct(
        move.after.shape,
        move.after.dtype,
        sharding=target.with_memory_kind("device") if is_on_host else target,
    )
    # Programs read and write device memory: an offloaded leaf passes through it.
    array = jax.device_put(array, jax.memory.Space.Device)
    flat = _reshaped(array, move.before.shape)
    across = jax.process_count() > 1
    if move.pieces:
        moved, count = transfer(flat, like, move.pieces, across_processes=across)
    else:
        moved, count = copied(flat, like), 0
    moved = _reshaped(moved, moved.shape if move.shape else ())
    if is_on_host:
        moved = jax.device_put(moved, target)
    return jax.block_until_ready(moved), count


def _reshaped(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Makes a scalar one element, or the reverse; other arrays are left as they are."""
    if array.shape == shape:
        return array
    return jax.jit(lambda x: x.reshape(shape), out_shardings=array.sharding)(array)


def _audit(moves: Moves, received: int) -> None:
    """Raises unless this process has received the bytes that were said before."""
    planned = sum(leaf.bytes_received_here for leaf in moves.leaves)
    if received != planned:
        raise RuntimeError(
            f"reshard moved {received:,} bytes to the devices of process "
            f"{jax.process_index()}, and its plan says {planned:,}: this is a bug of "
            "fsdp_jax. The state may be incomplete: load a checkpoint."
        )
