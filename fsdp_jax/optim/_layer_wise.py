"""Layer-wise optimizer, as for Muon: each matrix is updated unsharded on one device.

`_matrix_stack` has the layout of its state.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import Array, Float

from fsdp_jax._tree import PyTree, leaf_name, matches, unmatched
from fsdp_jax.optim._fused_matrix import FusedMatrix, by_part
from fsdp_jax.optim._matrix_stack import (
    MatrixStack,
    Member,
    StackLayout,
    stack_matrices,
    unstack_matrices,
)
from fsdp_jax.optim._matrix_work import LayerWiseWork, balanced, work_of
from fsdp_jax.optim._owned_update import update_owned
from fsdp_jax.sharding._padded import pad_to
from fsdp_jax.sharding._plan import ParamPlan, Plan

Matrices = dict[str, Float[Array, "matrices rows cols"]]
"""Name of a stack -> all matrices of one shape; devices split the first dim."""


Selection = Sequence[str] | Mapping[str, int | FusedMatrix]
"""Path patterns of matrices, or what each of them is by pattern; see `layer_wise`."""


class LayerWiseState(NamedTuple):
    """State of the two optimizers of `layer_wise`.

    Attributes:
      matrices: State of `matrix_tx`.
      rest: State of `rest_tx`.
    """

    matrices: optax.OptState
    rest: optax.OptState


def layer_wise(
    plan: Plan,
    matrix_tx: optax.GradientTransformation,
    rest_tx: optax.GradientTransformation,
    matrices: Selection,
    *,
    per_matrix: bool = False,
) -> optax.GradientTransformation:
    """Updates some parameters matrix by matrix, each matrix unsharded on one device.

    A matrix that is split over devices can be orthogonalised only by communicating
    within each iteration. Here one all-to-all gives each device unsharded matrices,
    which it updates, and another one returns the updates to the shards. Parameters may
    be split over `tp`, `ep` and `pp` as well. A checkpoint stores the state by
    parameter, so that it loads on any mesh.

    Args:
      plan: Plan from `fully_shard`.
      matrix_tx: Transformation for the matrices, which it receives as a dict of stacks
        of shape `[matrices, rows, cols]`, such as `optax.contrib.muon(lr,
        muon_weight_dimension_numbers=lambda stacks: jax.tree.map(lambda _:
        optax.contrib.MuonDimensionNumbers((1,), (2,)), stacks))`. Some matrices of a
        stack are zeros, so that the devices divide it.
      rest_tx: Transformation for all other parameters, e.g. `optax.adamw(lr)`.
      matrices: Path patterns of parameters that are matrices, stacks of matrices, or
        experts with one matrix each. For kernels of more dims a mapping from pattern to
        the number of leading dims that are a matrix's rows, the others being its
        columns: `{"*.q_proj.kernel": 1}` for `[embed, heads, head_dim]`,
        `{"*.o_proj.kernel": 2}` for `[heads, head_dim, embed]`. A `FusedMatrix` in
        place of the number is a kernel of several matrices, such as a fused qkv, which
        `matrix_tx` updates each for itself.
      per_matrix: Whether `matrix_tx` updates each matrix independently of all others,
        as Muon does and a clip by the global norm does not. Devices then pass over the
        zero matrices, and where they do not divide a stack those own one matrix more
        that have the least work of the others (see `layer_wise_work`).

    Returns:
      A transformation for `init` and `make_train_step` of this plan.

    Raises:
      ValueError: If a pattern matches no trained parameter, or one that is not a
        matrix.

    Source: Megatron-LM `layer_wise_optimizer.py` (there whole parameters are assigned
      to ranks by compute; here matrices of one shape are distributed evenly, and with
      `per_matrix` those left over by compute) and
      `muon.py::TensorParallelMuon` with `split_qkv` and its mode `duplicated`: what it
      computes on each rank of tp, one device computes here.
    """
    matrices = _held(matrices)
    chosen = [param for param in plan.param_plans if _is_chosen(param, matrices)]
    layouts = _stack_layouts(plan, chosen, matrices, per_matrix=per_matrix)
    shapes = {param.name: param.shape for param in chosen}
    matrix_tx = by_part(matrix_tx, _fused_stacks(layouts, matrices))

    def split(tree: PyTree) -> tuple[Matrices, PyTree]:
        """Returns the stacks of matrices, and the tree without them."""
        leaves = dict(zip(_names(plan), plan.treedef.flatten_up_to(tree), strict=True))
        stacks = {name: _stacked(layout, leaves) for name, layout in layouts.items()}
        taken = {param.name for param in chosen}
        rest = [None if name in taken else leaf for name, leaf in leaves.items()]
        return stacks, plan.treedef.unflatten(rest)

    def join(stacks: Any, rest: PyTree) -> PyTree:
        leaves = dict(zip(_names(plan), plan.treedef.flatten_up_to(rest), strict=True))
        for name, layout in layouts.items():
            parts = _unstacked(layout, stacks[name])
            leaves |= {n: part.reshape(shapes[n]) for n, part in parts.items()}
        return plan.treedef.unflatten(leaves.values())

    def init(params):
        stacks, rest = split(params)
        matrix_state = _marked(layouts, matrix_tx.init(stacks))
        return LayerWiseState(matrix_state, rest_tx.init(rest))

    def update(updates, state, params=None):
        stacks, rest = split(updates)
        old, old_rest = (None, None) if params is None else split(params)
        plain = _unmarked(state.matrices)
        if per_matrix:
            stacks, matrix_state = update_owned(layouts, matrix_tx, stacks, plain, old)
        else:
            stacks, matrix_state = matrix_tx.update(stacks, plain, old)
        rest, rest_state = rest_tx.update(rest, state.rest, old_rest)
        new_state = LayerWiseState(_marked(layouts, matrix_state), rest_state)
        return join(stacks, rest), new_state

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def layer_wise_work(
    plan: Plan, matrices: Selection, *, per_matrix: bool = True
) -> LayerWiseWork:
    """Returns the work of each device in a step of `layer_wise`.

    All devices wait for the one with most, so its work tells what a larger mesh gains.

    Args:
      plan: Plan from `fully_shard`.
      matrices: As for `layer_wise`.
      per_matrix: As for `layer_wise`.

    Returns:
      Loads of the devices; printed, the largest beside a bound that none is below.

    Raises:
      ValueError: As `layer_wise` does.

    Example:
      >>> import jax
      >>> import fsdp_jax as fsdp
      >>> shapes = lambda key: {"a": jax.numpy.ones((3, 8, 16))}
      >>> plan = fsdp.fully_shard(
      ...     shapes, fsdp.make_mesh(devices=jax.devices()[:2]), [fsdp.Stacked("a")]
      ... )
      >>> fsdp.optim.layer_wise_work(plan, ["a"]).loads
      (2048, 1024)
    """
    matrices = _held(matrices)
    chosen = [param for param in plan.param_plans if _is_chosen(param, matrices)]
    return work_of(_stack_layouts(plan, chosen, matrices, per_matrix=per_matrix))


def _stack_layouts(
    plan: Plan,
    chosen: Sequence[ParamPlan],
    matrices: Selection,
    *,
    per_matrix: bool,
) -> dict[str, StackLayout]:
    _check(plan, chosen, matrices)
    members = [_member(plan, param, _num_row_dims(param, matrices)) for param in chosen]
    layouts = _layouts(members, plan, matrices)
    return balanced(layouts) if per_matrix else layouts


def _fused_stacks(
    layouts: Mapping[str, StackLayout], matrices: Selection
) -> dict[str, FusedMatrix]:
    found = {
        name: _fused(layout.members[0].name, matrices)
        for name, layout in layouts.items()
    }
    return {name: fused for name, fused in found.items() if fused is not None}


def _layouts(
    chosen: Sequence[Member], plan: Plan, matrices: Selection
) -> dict[str, StackLayout]:
    """Returns name of a stack -> its layout: one per matrix shape, parts and split."""
    groups: dict[tuple[Any, ...], list[Member]] = {}
    for member in chosen:
        lead = sum(member.split[:-2], ())
        fused = _fused(member.name, matrices)
        key = (member.shape[-2:], lead, member.split[-2:], fused)
        groups.setdefault(key, []).append(member)
    titles = collections.Counter(_title(*key) for key in groups)
    return {
        _title(*key, with_axes=titles[_title(*key)] > 1): StackLayout(
            plan.mesh, tuple(members)
        )
        for key, members in groups.items()
    }


def _member(plan: Plan, param: ParamPlan, num_row_dims: int) -> Member:
    spec = param.spec_with_tp(param.placements.optimizer)
    entries = [*spec, *[None] * (len(param.shape) - len(spec))]
    split = [(e,) if isinstance(e, str) else tuple(e or ()) for e in entries]
    lead = param.num_stacked + _counts_experts(plan, param)

    def merged(per_dim: Sequence[Any], merge: Callable[[Any], Any]) -> tuple[Any, ...]:
        rows = slice(lead, lead + num_row_dims)
        return (*per_dim[:lead], merge(per_dim[rows]), merge(per_dim[rows.stop :]))

    return Member(
        param.name,
        merged(param.shape, math.prod),
        merged(param.padded_shape, math.prod),
        merged(split, lambda axes: sum(axes, ())),
    )


def _title(
    shape: tuple[int, ...],
    lead: tuple[str, ...],
    split: Any,
    fused: FusedMatrix | None,
    *,
    with_axes: bool = False,
) -> str:
    """Returns the name of a stack, e.g. `16 x 64 split on 0`.

    With the axes of each split the names of all stacks differ.
    """
    title = " x ".join(map(str, shape))
    if fused is not None:
        title += f" of {fused.num_groups} x {'+'.join(map(str, fused.sizes))}"
    if lead:
        title += f" of {'_'.join(lead)}"
    for dim, axes in enumerate(split):
        if axes:
            over = "_".join(axes) if with_axes else "tp" * ("tp" in axes)
            title += f" split on {dim}" + (f" over {over}" if over else "")
    return title


def _stacked(
    layout: StackLayout, leaves: Mapping[str, Array]
) -> Float[Array, "matrices rows cols"]:
    matrices = {m: leaves[m.name].reshape(m.shape) for m in layout.members}
    pieces = [pad_to(matrix, m.padded_shape) for m, matrix in matrices.items()]
    return stack_matrices(layout, pieces)


def _unstacked(
    layout: StackLayout, stack: Float[Array, "matrices rows cols"]
) -> dict[str, Array]:
    pieces = zip(layout.members, unstack_matrices(layout, stack), strict=True)
    return {m.name: p[tuple(slice(size) for size in m.shape)] for m, p in pieces}


def _marked(layouts: Mapping[str, StackLayout], state: PyTree) -> PyTree:
    """Wraps the arrays of the state that have one entry a matrix in `MatrixStack`."""

    def mark(path: tuple[Any, ...], leaf: Any) -> Any:
        # optax states contain trees like the parameters, here the dict of stacks: the
        # path of such a leaf ends in the name of a stack.
        layout = layouts.get(leaf_name(path[-1:]))
        if layout is None or leaf.shape[:1] != (layout.num_matrices,):
            return leaf
        return MatrixStack(leaf, layout)

    return jax.tree_util.tree_map_with_path(mark, state)


def _unmarked(state: PyTree) -> PyTree:
    def is_stacked(node: Any) -> bool:
        return isinstance(node, MatrixStack)

    return jax.tree.map(
        lambda node: node.value if is_stacked(node) else node, state, is_leaf=is_stacked
    )


def _names(plan: Plan) -> list[str]:
    return [param.name for param in plan.param_plans]


def _num_row_dims(param: ParamPlan, matrices: Selection) -> int:
    """Returns the number of dims that are rows, by the first pattern that matches."""
    if not isinstance(matrices, Mapping):
        return 1
    fused = _fused(param.name, matrices)
    if fused is not None:
        return fused.num_row_dims
    return next(
        n
        for pattern, n in matrices.items()
        if matches(pattern, param.name) and isinstance(n, int)
    )


def _fused(name: str, matrices: Selection) -> FusedMatrix | None:
    """Returns the parts of a parameter, by the first pattern that matches."""
    if not isinstance(matrices, Mapping):
        return None
    found = next(of for pattern, of in matrices.items() if matches(pattern, name))
    return found if isinstance(found, FusedMatrix) else None


def _held(matrices: Selection) -> Selection:
    """Returns the patterns in a form that can be read again, as a generator cannot."""
    return matrices if isinstance(matrices, Mapping) else tuple(matrices)


def _is_chosen(param: ParamPlan, patterns: Selection) -> bool:
    return param.is_optimized and any(
        matches(pattern, param.name) for pattern in patterns
    )


def _check(
    plan: Plan,
    chosen: Sequence[ParamPlan],
    patterns: Selection,
) -> None:
    optimized = [param.name for param in plan.param_plans if param.is_optimized]
    wrong = [
        f"'{param.name}' {param.shape} is not a matrix"
        for param in chosen
        if not _is_matrix(plan, param, patterns)
    ]
    wrong += [
        f"'{param.name}' {param.shape} has other columns than {fused.num_cols} of "
        f"{fused}"
        for param in chosen
        if _is_matrix(plan, param, patterns)
        and (fused := _fused(param.name, patterns)) is not None
        and _member(plan, param, fused.num_row_dims).shape[-1] != fused.num_cols
    ]
    wrong += [
        f"{pattern!r} matches nothing that is trained"
        for pattern in unmatched(tuple(patterns), optimized)
    ]
    if wrong:
        named = patterns if isinstance(patterns, Mapping) else tuple(patterns)
        raise ValueError(
            f"layer_wise(matrices={named}): {'; '.join(wrong)}. Name "
            "parameters that have two dims in their unit, or two behind the one of "
            "FSDPConfig(expert_parallel=...), and leave the others to rest_tx. For "
            "kernels of more dims give {pattern: number of dims that are rows}."
        )


def _is_matrix(plan: Plan, param: ParamPlan, patterns: Selection) -> bool:
    num_dims = param.ndim_in_unit - _counts_experts(plan, param)
    if not isinstance(patterns, Mapping):
        return num_dims == 2
    return 0 < _num_row_dims(param, patterns) < num_dims


def _counts_experts(plan: Plan, param: ParamPlan) -> bool:
    """Returns whether the first dim in its unit counts experts, on any mesh."""
    dims = [
        dim % param.ndim_in_unit
        for pattern, dim in plan.config.expert_parallel.items()
        if matches(pattern, param.name)
    ]
    return dims[:1] == [0]
