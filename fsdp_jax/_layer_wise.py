"""Optimizers that need whole matrices: each device owns some, and none has all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from fsdp_jax._mesh import num_devices
from fsdp_jax._padded import pad_to
from fsdp_jax._plan import ParamPlan, Plan
from fsdp_jax._tree import PyTree, matches

Matrices = dict[str, Float[Array, "matrices rows cols"]]
"""All matrices of one shape in one array, split over devices along the first dim."""


class LayerWiseState(NamedTuple):
    """The state of the two optimizers, see `layer_wise`."""

    matrices: optax.OptState
    rest: optax.OptState


def layer_wise(
    plan: Plan,
    matrix_tx: optax.GradientTransformation,
    rest_tx: optax.GradientTransformation,
    matrices: Sequence[str],
) -> optax.GradientTransformation:
    """Updates some parameters matrix by matrix, each matrix whole on one device.

    A matrix that is split over devices can be orthogonalised only by communicating
    within each iteration. Here one all-to-all hands each device whole matrices, it
    updates these, and another one brings the updates back.

    Args:
      plan: From `fully_shard`.
      matrix_tx: For the matrices, handed to it as a dict of stacks of shape
        `[matrices, rows, cols]`, such as `optax.contrib.muon(lr,
        muon_weight_dimension_numbers=lambda stacks: jax.tree.map(lambda _:
        optax.contrib.MuonDimensionNumbers((1,), (2,)), stacks))`. Behind the last
        matrix of a stack there are zeros, until the devices divide it.
      rest_tx: For all other parameters, e.g. `optax.adamw(lr)`.
      matrices: Path patterns of the parameters that are matrices, or stacks of them.

    Returns:
      A transformation for `init` and `make_train_step` of this plan.

    Raises:
      ValueError: If a pattern matches nothing trained, or what is no matrix.

    Source: Megatron-LM `layer_wise_optimizer.py` (whole parameters are placed on ranks
      there, by compute; here matrices of one shape are dealt out evenly).
    """
    chosen = [row for row in plan.rows if _is_chosen(row, matrices)]
    _check(plan, chosen, matrices)
    groups: dict[tuple[int, int, int | None], list[ParamPlan]] = {}
    for row in chosen:
        rows, cols = row.shape[-2:]
        dim = None if row.dim is None else row.dim - (len(row.shape) - 2)
        groups.setdefault((rows, cols, dim), []).append(row)
    named = {
        f"{rows} x {cols}" + ("" if dim is None else f" split on {dim}"): members
        for (rows, cols, dim), members in groups.items()
    }

    def split(tree: PyTree) -> tuple[Matrices, PyTree]:
        """The stacks of matrices, and the tree without them."""
        leaves = dict(zip(_names(plan), plan.treedef.flatten_up_to(tree), strict=True))
        stacks = {
            name: _dealt_out(plan, members, [leaves[row.name] for row in members])
            for name, members in named.items()
        }
        taken = {row.name for row in chosen}
        rest = [None if name in taken else leaf for name, leaf in leaves.items()]
        return stacks, plan.treedef.unflatten(rest)

    def join(stacks: Any, rest: PyTree) -> PyTree:
        leaves = dict(zip(_names(plan), plan.treedef.flatten_up_to(rest), strict=True))
        for name, members in named.items():
            pieces = _brought_back(plan, members, stacks[name])
            leaves |= {row.name: p for row, p in zip(members, pieces, strict=True)}
        return plan.treedef.unflatten(leaves.values())

    def init(params):
        stacks, rest = split(params)
        return LayerWiseState(matrix_tx.init(stacks), rest_tx.init(rest))

    def update(updates, state, params=None):
        stacks, rest = split(updates)
        old, old_rest = (None, None) if params is None else split(params)
        stacks, matrix_state = matrix_tx.update(stacks, state.matrices, old)
        rest, rest_state = rest_tx.update(rest, state.rest, old_rest)
        return join(stacks, rest), LayerWiseState(matrix_state, rest_state)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _dealt_out(
    plan: Plan, members: Sequence[ParamPlan], leaves: Sequence[Array]
) -> Float[Array, "matrices rows cols"]:
    """Parameters as one stack of whole matrices, split along the stack."""
    axes, num_shards = _owners(plan, members)
    rows, cols = members[0].shape[-2:]

    def local(*pieces):
        flat = jnp.concatenate([p.reshape(-1, *p.shape[-2:]) for p in pieces])
        flat = jnp.pad(flat, ((0, -len(flat) % num_shards), (0, 0), (0, 0)))
        if axes:
            dim = _dim(members[0])
            flat = lax.all_to_all(flat, axes, split_axis=0, concat_axis=dim, tiled=True)
        return flat[:, :rows, :cols]

    pairs = zip(members, leaves, strict=True)
    padded = [pad_to(leaf, row.padded_shape) for row, leaf in pairs]
    specs = [row.spec(axes) for row in members]
    return _over_mesh(plan, local, specs, _stack_spec(axes))(*padded)


def _brought_back(
    plan: Plan,
    members: Sequence[ParamPlan],
    stack: Float[Array, "matrices rows cols"],
) -> list[Array]:
    """The inverse of `_dealt_out`."""
    axes, _ = _owners(plan, members)
    counts = [math.prod(row.shape[:-2]) for row in members]

    def local(stack):
        if axes:
            dim, padding = _dim(members[0]), members[0].padding
            widths = [(0, padding if d == dim else 0) for d in range(3)]
            stack = jnp.pad(stack, widths)
            stack = lax.all_to_all(
                stack, axes, split_axis=dim, concat_axis=0, tiled=True
            )
        pieces, start = [], 0
        for row, count in zip(members, counts, strict=True):
            piece = stack[start : start + count]
            pieces.append(piece.reshape(*row.shape[:-2], *piece.shape[1:]))
            start += count
        return pieces

    specs = [row.spec(axes) for row in members]
    pieces = _over_mesh(plan, local, _stack_spec(axes), specs)(stack)
    return [
        piece[tuple(slice(size) for size in row.shape)]
        for row, piece in zip(members, pieces, strict=True)
    ]


def _owners(plan: Plan, members: Sequence[ParamPlan]) -> tuple[tuple[str, ...], int]:
    axes = members[0].placements.optimizer
    return axes, num_devices(plan.mesh, axes)


def _dim(row: ParamPlan) -> int:
    """The split dim of a matrix of `row` in its stack `[matrices, rows, cols]`."""
    assert row.dim is not None
    return row.dim - (len(row.shape) - 2) + 1


def _stack_spec(axes: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(axes) if axes else PartitionSpec()


def _over_mesh(plan: Plan, local, in_specs, out_specs):
    in_specs = tuple(in_specs) if isinstance(in_specs, list) else (in_specs,)
    return jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=plan.manual_axes,
        check_vma=False,
    )


def _names(plan: Plan) -> list[str]:
    return [row.name for row in plan.rows]


def _is_chosen(row: ParamPlan, patterns: Sequence[str]) -> bool:
    return row.is_optimized and any(matches(pattern, row.name) for pattern in patterns)


def _check(plan: Plan, chosen: Sequence[ParamPlan], patterns: Sequence[str]) -> None:
    unused = [p for p in patterns if not any(_is_chosen(r, (p,)) for r in plan.rows)]
    wrong = [
        f"'{row.name}' {row.shape} is no matrix"
        for row in chosen
        if row.ndim_in_unit != 2
    ]
    wrong += [
        f"'{row.name}' is split over tp" for row in chosen if row.tensor_dim is not None
    ]
    wrong += [f"'{row.name}' is split over ep" for row in chosen if row.is_expert]
    wrong += [f"'{row.name}' is split over pp" for row in chosen if row.is_staged]
    wrong += [f"{pattern!r} matches nothing that is trained" for pattern in unused]
    if wrong:
        raise ValueError(
            f"layer_wise(matrices={tuple(patterns)}): {'; '.join(wrong)}. Name "
            "parameters that have two dims in their unit, and leave the others to "
            "rest_tx."
        )
