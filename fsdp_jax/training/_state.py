"""What a training run carries from step to step, and how it is born sharded."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key

from fsdp_jax._tree import PyTree, named_leaves
from fsdp_jax.optim._matrix_stack import Dealt
from fsdp_jax.sharding._attributes import trace_model
from fsdp_jax.sharding._config import Placements
from fsdp_jax.sharding._fully_shard import choose_split
from fsdp_jax.sharding._mesh import num_devices
from fsdp_jax.sharding._offload import moulds_on_host
from fsdp_jax.sharding._padded import Padded, pack, unpack
from fsdp_jax.sharding._plan import ParamPlan, Plan
from fsdp_jax.training._loss_scale import LossScale, ScaleState
from fsdp_jax.training._optimizer import abstract_optimizer_state
from fsdp_jax.training._trainable import seen_by_optimizer
from fsdp_jax.training._unnamed import all_of, unnamed_arrays


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        *("step", "params", "opt_state", "model_state", "rng", "num_skipped"),
        "loss_scale",
    ),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a step reads and writes.

    There is no public way to replace `params` alone: what the optimizer derived from
    the old ones would silently win at the next step. Start again with `init`.

    As made by `abstract_state` its leaves are `jax.ShapeDtypeStruct`s: the mould. An
    array that the devices do not divide is a `Padded` leaf; `fsdp_jax.unpack` makes
    plain arrays of all.

    Attributes:
      step: Steps made so far.
      params: The parameters, in the placement and dtype of `plan.params`.
      opt_state: The optax state, every array of it split like its parameter.
      model_state: Arrays of the model that are no parameters (dropout keys, BatchNorm
        statistics), whole on every device.
      rng: The key from which each step, microbatch and data rank derives its own.
      num_skipped: Steps that left everything as it was, see `make_train_step`.
      loss_scale: Where a dynamic loss scale stands; None without one.
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    rng: Key[Array, ""]
    num_skipped: Int[Array, ""]
    loss_scale: ScaleState | None = None


def init_params(plan: Plan, key: Key[Array, ""]) -> PyTree:
    """Makes the parameters at random, each device only its own shards.

    Args:
      plan: From `fully_shard`.
      key: Handed to the plan's `make_model`.

    Returns:
      The parameters in the mould `plan.params`; the same numbers on every mesh.
    """

    def make(key):
        params, _ = plan.model.split(trace_model(plan.make_model, key))
        if plan.model.adapted is not None:
            params = plan.model.adapted.complete(params, jax.random.fold_in(key, 1))
        return jax.tree.map(lambda p, m: jnp.asarray(p, m.dtype), params, plan.params)

    return jax.jit(make, out_shardings=plan.shardings)(key)


def init(
    plan: Plan,
    tx: optax.GradientTransformation,
    params: PyTree,
    *,
    rng: Key[Array, ""] | None = None,
    model_state: PyTree | None = None,
    opt_state: PyTree | None = None,
    step: int = 0,
    loss_scale: LossScale | None = None,
) -> TrainState:
    """Starts training from `params`: makes the optimizer state, sharded like them.

    Or goes on with one that comes from elsewhere, such as the moments of a run that
    Megatron began: `optax.tree.set(tx.init(params), mu=mu, nu=nu, count=count)`.

    Args:
      plan: From `fully_shard`.
      tx: Any optax transformation.
      params: In the mould `plan.params`, from `init_params` or a checkpoint. The state
        takes them over: the first step donates them.
      rng: Where dropout and other randomness starts; default `jax.random.key(0)`.
      model_state: The model's arrays that are no parameters, in the mould
        `plan.model_state`, e.g. BatchNorm statistics of a trained model. None: as
        `make_model(rng)` makes them.
      opt_state: The state of `tx` for these `params`, plain arrays in their logical
        shapes, sharded in any way. None: as `tx.init` makes it.
      step: Steps made so far, where `opt_state` is that of a run.
      loss_scale: That of `make_train_step`, where it has one.

    Raises:
      ValueError: If `params` or `opt_state` does not fit; all offenders in one message.
    """
    check_fits(params, plan.params, "params")
    if opt_state is not None:
        _check_opt_state(plan, tx, opt_state)
    if model_state is not None:
        check_fits(model_state, plan.model_state, "model_state")
    rng = jax.random.key(0) if rng is None else rng
    mould = abstract_state(plan, tx, loss_scale)

    def rest(params, rng, model_state, opt_state):
        if model_state is None:
            _, model_state = plan.model.split(trace_model(plan.make_model, rng))
        zero = jnp.zeros((), jnp.int32)
        # A copy, since the state is donated and the caller's key is not ours to delete.
        key = jax.random.wrap_key_data(
            jax.random.key_data(rng), impl=jax.random.key_impl(rng)
        )
        if opt_state is None:
            opt_state = tx.init(seen_by_optimizer(plan, params))
        opt_state = pack(opt_state, mould.opt_state)
        scale = None if loss_scale is None else loss_scale.start()
        return zero + step, opt_state, model_state, key, zero, scale

    def sharding_of(tree):
        return jax.tree.map(lambda leaf: leaf.sharding, tree)

    wanted = (mould.step, mould.opt_state, mould.model_state, mould.rng)
    wanted = (*wanted, mould.num_skipped, mould.loss_scale)
    make_rest = jax.jit(rest, out_shardings=sharding_of(wanted))
    made, opt_state, *others = make_rest(params, rng, model_state, opt_state)
    if any(row.is_padded for row in plan.rows):
        params = _pack_each(plan, params)
    if plan.config.offload and plan.config.offload.params:
        params = jax.device_put(params, sharding_of(mould.params))
    return TrainState(made, params, opt_state, *others)


def _check_opt_state(
    plan: Plan, tx: optax.GradientTransformation, opt_state: PyTree
) -> None:
    """Raises one `ValueError` that lists what `tx` would not have made so."""
    mould = abstract_optimizer_state(tx, seen_by_optimizer(plan, plan.params))
    have, want = dict(named_leaves(opt_state)), dict(named_leaves(mould))
    problems = [f"missing: {name}" for name in want if name not in have]
    problems += [f"unexpected: {name}" for name in have if name not in want]
    problems += [
        f"{name}: {have[name].dtype}{list(have[name].shape)}, "
        f"wanted {leaf.dtype}{list(leaf.shape)}"
        for name, leaf in want.items()
        if name in have
        and (have[name].shape, have[name].dtype) != (leaf.shape, leaf.dtype)
    ]
    if problems:
        raise ValueError(
            f"opt_state is not what this optimizer makes, in {len(problems)} place(s):"
            "\n  " + "\n  ".join(problems)
        )


def _pack_each(plan: Plan, params: PyTree) -> PyTree:
    """Pads what rests padded; all else is handed on, not copied."""

    def to_rest(leaf, mould):
        if not isinstance(mould, Padded):
            return leaf
        packing = functools.partial(pack, mould=mould)
        return jax.jit(packing, out_shardings=mould.value.sharding)(leaf)

    moulds = plan.treedef.flatten_up_to(plan.packed_params)
    leaves = plan.treedef.flatten_up_to(params)
    return plan.treedef.unflatten(map(to_rest, leaves, moulds))


def abstract_state(
    plan: Plan,
    tx: optax.GradientTransformation,
    loss_scale: LossScale | None = None,
) -> TrainState:
    """The mould of a `TrainState`: shapes, dtypes and shardings, no memory taken."""
    whole = NamedSharding(plan.mesh, PartitionSpec())
    key = jax.eval_shape(lambda: jax.random.key(0))

    offload = plan.config.offload

    def scalar(dtype) -> Any:
        return jax.ShapeDtypeStruct((), dtype, sharding=whole)

    def at_rest(moulds, is_offloaded):
        return moulds_on_host(offload, moulds) if offload and is_offloaded else moulds

    return TrainState(
        step=scalar(jnp.int32),
        params=at_rest(plan.packed_params, offload and offload.params),
        opt_state=at_rest(_abstract_opt_state(plan, tx), offload and offload.optimizer),
        model_state=plan.model_state,
        rng=scalar(key.dtype),
        num_skipped=scalar(jnp.int32),
        loss_scale=None
        if loss_scale is None
        else ScaleState(scalar(jnp.float32), scalar(jnp.int32), scalar(jnp.int32)),
    )


def gather(tree: PyTree) -> PyTree:
    """Makes every array of a sharded tree whole on every device, in its logical shape.

    For looking at small things: it takes the memory of the whole tree on each device.
    """
    return unpack(jax.tree.map(_gather_leaf, tree))


def _gather_leaf(leaf: Array) -> Array:
    if not isinstance(leaf.sharding, NamedSharding):
        return leaf
    whole = NamedSharding(leaf.sharding.mesh, PartitionSpec())
    return jax.device_put(leaf, whole)


def check_fits(tree: PyTree, mould: PyTree, what: str) -> None:
    """Raises one `ValueError` that lists every leaf of `tree` that misfits `mould`."""
    have, want = dict(named_leaves(tree)), dict(named_leaves(mould))
    problems = [f"missing: {name}" for name in want if name not in have]
    problems += [f"unexpected: {name}" for name in have if name not in want]
    for name, leaf in want.items():
        if name in have:
            problems += _misfits(name, have[name], leaf)
    if problems:
        raise ValueError(
            f"{what} does not fit the plan in {len(problems)} place(s):\n  "
            + "\n  ".join(problems)
            + "\nMake it with init_params(plan, key), or load it into the plan's mould."
        )


def _misfits(name: str, leaf: Any, mould: jax.ShapeDtypeStruct) -> list[str]:
    if isinstance(leaf, Padded):
        return [f"{name}: padded, as in a TrainState; take fsdp.unpack(state.params)"]
    if tuple(leaf.shape) != mould.shape:
        return [f"{name}: shape {tuple(leaf.shape)}, planned {mould.shape}"]
    if leaf.dtype != mould.dtype:
        return [f"{name}: dtype {leaf.dtype}, planned {mould.dtype}"]
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not sharding.is_equivalent_to(mould.sharding, leaf.ndim):
        return [f"{name}: sharding {sharding}, planned {mould.sharding}"]
    return []


def _abstract_opt_state(plan: Plan, tx: optax.GradientTransformation) -> PyTree:
    """Shards the optimizer's arrays by path and shape, whatever the optimizer.

    An array whose path ends in a parameter's path belongs to that parameter. If it has
    its shape it is split like it; if not (Adafactor's factors), or if it belongs to
    none, over the same axes on a dim of its own. What has no dim of at least 2 elements
    is whole, and what belongs to a parameter that is whole.

    An array that belongs to none may hold values of several, by their position, such as
    the one vector of `optax.flatten`: it says of which, so that a checkpoint of it does
    not load for others.
    """
    params = seen_by_optimizer(plan, plan.params)
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    trained = [row for row in plan.rows if row.is_optimized]
    rows = {path: row for (path, _), row in zip(flat, trained, strict=True)}
    everyone = all_of(trained)
    shapes = abstract_optimizer_state(tx, params)
    unnamed = unnamed_arrays(tx, params, shapes, lambda p: not _parameter_of(p, rows))

    def mould(path: tuple[Any, ...], leaf: Any) -> Any:
        if isinstance(leaf, Dealt):
            return leaf.abstract()
        row = _parameter_of(path, rows)
        shape = tuple(leaf.shape)
        if row is None or shape != row.shape:
            row = _row_of_its_own(plan, shape, row)
        of = everyone if path in unnamed else ""
        spec = row.spec_with_tp(row.placements.optimizer)
        struct = jax.ShapeDtypeStruct(
            row.padded_shape, leaf.dtype, sharding=NamedSharding(plan.mesh, spec)
        )
        return Padded(struct, shape, of) if row.is_padded or of else struct

    return jax.tree_util.tree_map_with_path(
        mould, shapes, is_leaf=lambda node: isinstance(node, Dealt)
    )


def _parameter_of(
    path: tuple[Any, ...], rows: dict[tuple[Any, ...], ParamPlan]
) -> ParamPlan | None:
    suffixes = (path[start:] for start in range(len(path) + 1))
    return next((rows[suffix] for suffix in suffixes if suffix in rows), None)


def _row_of_its_own(
    plan: Plan, shape: tuple[int, ...], owner: ParamPlan | None
) -> ParamPlan:
    """How an array is split that has not the shape of the parameter it belongs to."""
    row = owner or plan.rows[0]
    # Of experts too: what has no dim of experts is split over `ep` as all else.
    placements = plan.placements
    if owner is not None and not owner.is_expert:
        placements = owner.placements
    num_shards = num_devices(plan.mesh, placements.optimizer)
    # Of a stack of layers: each stage has what belongs to its own.
    is_staged = bool(owner and owner.is_staged and shape[:1] == owner.shape[:1])
    if num_shards == 1:
        dim, padding = None, 0
    elif owner and _has_its_split_dim(shape, owner):
        dim, padding = owner.dim, owner.padding
    elif owner:
        dim, padding = choose_split(shape, num_shards, num_stacked=int(is_staged))
    else:
        # The first dim that divides: of a stack, whole members. What none of divides is
        # coefficients, and no state that grows with the model.
        even = (d for d, size in enumerate(shape) if size and not size % num_shards)
        dim, padding = next(even, None), 0
    if dim is None:
        placements = Placements((), (), ())
    return dataclasses.replace(
        row,
        shape=shape,
        dim=dim,
        padding=padding,
        tensor_dim=None,
        expert_dim=None,
        placements=placements,
        is_staged=is_staged,
        stage_padding=row.stage_padding if is_staged else 0,
    )


def _has_its_split_dim(shape: tuple[int, ...], owner: ParamPlan) -> bool:
    """Whether an array differs from its parameter in dims that are not split.

    Such are the scales of moments in 8 bits: each lies beside what it is the scale of.
    """
    dim = owner.dim
    if dim is None or len(shape) != len(owner.shape):
        return False
    return shape[dim] == owner.shape[dim]
