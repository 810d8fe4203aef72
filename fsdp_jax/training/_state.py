"""Train state: its construction, its sharding, and its abstract form."""

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
from fsdp_jax.sharding._ambient_mesh import in_own_mesh
from fsdp_jax.sharding._attributes import trace_model
from fsdp_jax.sharding._config import Placements
from fsdp_jax.sharding._fully_shard import choose_split
from fsdp_jax.sharding._mesh import num_devices
from fsdp_jax.sharding._offload import abstract_on_host
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
    """State that a training step reads and writes.

    There is no public way to replace `params` alone: values that the optimizer derived
    from the old ones would silently win at the next step. Call `init_state` again.

    From `abstract_state` its leaves are `jax.ShapeDtypeStruct`s. An array that the
    devices do not divide evenly is a `Padded` leaf; `fsdp_jax.sharding.unpack` makes
    plain arrays of all leaves.

    Attributes:
      step: Number of steps made so far, `int32[]`.
      params: Parameters, with the shardings and dtypes of `plan.params`.
      opt_state: State of the optax transformation, each array sharded like its
        parameter.
      model_state: Arrays of the model that are not parameters (dropout keys, BatchNorm
        statistics), replicated on every device.
      rng: PRNG key from which each step, microbatch and data rank derives its own.
      num_skipped: Number of steps that left everything unchanged, `int32[]`, see
        `make_train_step`.
      loss_scale: State of a dynamic loss scale; None without one.

    Examples:
      >>> state = fsdp.init_state(plan, tx, params)
      >>> int(state.step), int(state.num_skipped)
      (0, 0)
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    rng: Key[Array, ""]
    num_skipped: Int[Array, ""]
    loss_scale: ScaleState | None = None


@in_own_mesh
def init_params(plan: Plan, key: Key[Array, ""]) -> PyTree:
    """Initializes the parameters from a key; each device computes only its own shards.

    Args:
      plan: Plan from `fully_shard`.
      key: PRNG key, passed to the plan's `make_model`.

    Returns:
      Parameters that match `plan.params`, with the same values on every mesh.

    Examples:
      >>> params = fsdp.init_params(plan, jax.random.key(0))
      >>> params["head"].addressable_shards[0].data.shape
      (2, 16)
    """

    def make(key):
        params, _ = plan.model.split(trace_model(plan.make_model, key))
        if plan.model.adapted is not None:
            params = plan.model.adapted.complete(params, jax.random.fold_in(key, 1))
        return jax.tree.map(lambda p, m: jnp.asarray(p, m.dtype), params, plan.params)

    return jax.jit(make, out_shardings=plan.shardings)(key)


@in_own_mesh
def init_state(
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
    """Makes the initial training state, with optimizer state sharded like `params`.

    The optimizer state may come from elsewhere, such as the moments of a run that began
    in Megatron: `optax.tree.set(tx.init(params), mu=mu, nu=nu, count=count)`.

    Args:
      plan: Plan from `fully_shard`.
      tx: Any optax transformation.
      params: Parameters that match `plan.params`, from `init_params` or a checkpoint.
        The state takes ownership of them: the first step donates them.
      rng: PRNG key of dropout and other randomness; default `jax.random.key(0)`.
      model_state: Arrays of the model that are not parameters, matching
        `plan.model_state`, e.g. BatchNorm statistics of a trained model. None for those
        that `make_model(rng)` makes.
      opt_state: State of `tx` for these `params`, plain arrays in their logical shapes
        with any sharding. None for that of `tx.init`.
      step: Number of steps made so far, where `opt_state` is that of a run.
      loss_scale: Loss scale passed to `make_train_step`, if any.

    Returns:
      State for `make_train_step`.

    Raises:
      ValueError: If `params`, `opt_state` or `model_state` does not fit the plan; each
        message lists all offenders of one tree.

    Examples:
      >>> state = fsdp.init_state(plan, tx, params)
      >>> state.opt_state[0].mu["head"].sharding == params["head"].sharding
      True
    """
    check_fits(params, plan.params, "params")
    if opt_state is not None:
        _check_opt_state(plan, tx, opt_state)
    if model_state is not None:
        check_fits(model_state, plan.model_state, "model_state")
    rng = jax.random.key(0) if rng is None else rng
    abstract = abstract_state(plan, tx, loss_scale)

    def rest(params, rng, model_state, opt_state):
        if model_state is None:
            _, model_state = plan.model.split(trace_model(plan.make_model, rng))
        zero = jnp.zeros((), jnp.int32)
        # Copied, since the state is donated and must not delete the caller's key.
        key = jax.random.wrap_key_data(
            jax.random.key_data(rng), impl=jax.random.key_impl(rng)
        )
        if opt_state is None:
            opt_state = tx.init(seen_by_optimizer(plan, params))
        opt_state = pack(opt_state, abstract.opt_state)
        scale = None if loss_scale is None else loss_scale.start()
        return zero + step, opt_state, model_state, key, zero, scale

    def sharding_of(tree):
        return jax.tree.map(lambda leaf: leaf.sharding, tree)

    wanted = (abstract.step, abstract.opt_state, abstract.model_state, abstract.rng)
    wanted = (*wanted, abstract.num_skipped, abstract.loss_scale)
    # One jit with output shardings: each device computes only its own shards.
    make_rest = jax.jit(rest, out_shardings=sharding_of(wanted))
    made, opt_state, *others = make_rest(params, rng, model_state, opt_state)
    if any(param.is_padded for param in plan.param_plans):
        params = _pack_each(plan, params)
    if plan.config.offload and plan.config.offload.params:
        params = jax.device_put(params, sharding_of(abstract.params))
    return TrainState(made, params, opt_state, *others)


def _check_opt_state(
    plan: Plan, tx: optax.GradientTransformation, opt_state: PyTree
) -> None:
    """Raises one `ValueError` that lists all differences from the state `tx` makes."""
    abstract = abstract_optimizer_state(tx, seen_by_optimizer(plan, plan.params))
    have, want = dict(named_leaves(opt_state)), dict(named_leaves(abstract))
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
    """Pads the parameters stored padded; returns all others uncopied."""

    def to_rest(leaf, abstract):
        if not isinstance(abstract, Padded):
            return leaf
        # One jit per padded leaf: a jit over the tree would copy the unpadded leaves.
        packing = functools.partial(pack, like=abstract)
        return jax.jit(packing, out_shardings=abstract.value.sharding)(leaf)

    abstracts = plan.treedef.flatten_up_to(plan.packed_params)
    leaves = plan.treedef.flatten_up_to(params)
    return plan.treedef.unflatten(map(to_rest, leaves, abstracts))


@in_own_mesh
def abstract_state(
    plan: Plan,
    tx: optax.GradientTransformation,
    loss_scale: LossScale | None = None,
) -> TrainState:
    """Returns the abstract `TrainState`: shapes, dtypes and shardings, without arrays.

    Args:
      plan: Plan from `fully_shard`.
      tx: Any optax transformation.
      loss_scale: Loss scale passed to `make_train_step`, if any.

    Returns:
      State of `jax.ShapeDtypeStruct` leaves, e.g. for `load` or `step.lower`.

    Examples:
      >>> state = fsdp.abstract_state(plan, tx)
      >>> head = state.params["head"]
      >>> head.shape, head.sharding.shard_shape(head.shape)
      ((16, 16), (2, 16))
    """
    whole = NamedSharding(plan.mesh, PartitionSpec())
    key = jax.eval_shape(lambda: jax.random.key(0))

    offload = plan.config.offload

    def scalar(dtype) -> Any:
        return jax.ShapeDtypeStruct((), dtype, sharding=whole)

    def at_rest(abstracts, is_offloaded):
        return (
            abstract_on_host(offload, abstracts)
            if offload and is_offloaded
            else abstracts
        )

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


def unshard(tree: PyTree) -> PyTree:
    """Replicates every array of a sharded tree on every device, in its logical shape.

    It is meant for small trees: each device holds the whole tree.

    Args:
      tree: Tree of `jax.Array`s and `Padded`, e.g. parameters.

    Returns:
      The same tree of arrays without padding, in the same dtypes.

    Examples:
      >>> head = fsdp.unshard(params)["head"]
      >>> head.sharding.is_fully_replicated
      True
    """
    return unpack(jax.tree.map(_gather_leaf, tree))


def _gather_leaf(leaf: Array) -> Array:
    if not isinstance(leaf.sharding, NamedSharding):
        return leaf
    whole = NamedSharding(leaf.sharding.mesh, PartitionSpec())
    return jax.device_put(leaf, whole)


def check_fits(tree: PyTree, abstract: PyTree, what: str) -> None:
    """Raises one `ValueError` that lists every leaf that does not match `abstract`."""
    have, want = dict(named_leaves(tree)), dict(named_leaves(abstract))
    problems = [f"missing: {name}" for name in want if name not in have]
    problems += [f"unexpected: {name}" for name in have if name not in want]
    for name, leaf in want.items():
        if name in have:
            problems += _misfits(name, have[name], leaf)
    if problems:
        raise ValueError(
            f"{what} does not fit the plan in {len(problems)} place(s):\n  "
            + "\n  ".join(problems)
            + "\nMake it with init_params(plan, key), or load it with "
            "like=abstract_state(plan, tx)."
        )


def _misfits(name: str, leaf: Any, abstract: jax.ShapeDtypeStruct) -> list[str]:
    if isinstance(leaf, Padded):
        return [
            f"{name}: padded, as in a TrainState; take "
            "fsdp.sharding.unpack(state.params)"
        ]
    if tuple(leaf.shape) != abstract.shape:
        return [f"{name}: shape {tuple(leaf.shape)}, planned {abstract.shape}"]
    if leaf.dtype != abstract.dtype:
        return [f"{name}: dtype {leaf.dtype}, planned {abstract.dtype}"]
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not sharding.is_equivalent_to(abstract.sharding, leaf.ndim):
        return [f"{name}: sharding {sharding}, planned {abstract.sharding}"]
    return []


def _abstract_opt_state(plan: Plan, tx: optax.GradientTransformation) -> PyTree:
    """Shards the optimizer's arrays by path and shape, for any optimizer.

    An array whose path ends in a parameter's path belongs to that parameter. If it has
    the parameter's shape, it is sharded like it; if not (Adafactor's factors), or if it
    belongs to no parameter, it is sharded over the same axes on a dim of its own. An
    array without a dim of at least 2 elements is replicated, and so is one that belongs
    to a replicated parameter.

    An array that belongs to no parameter may hold values of several by position, such
    as the one vector of `optax.flatten`. Its `Padded.of` identifies the parameters, so
    that a checkpoint of it does not load for others.
    """
    params = seen_by_optimizer(plan, plan.params)
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    trained = [param for param in plan.param_plans if param.is_optimized]
    by_path = {path: param for (path, _), param in zip(flat, trained, strict=True)}
    everyone = all_of(trained)
    shapes = abstract_optimizer_state(tx, params)
    unnamed = unnamed_arrays(
        tx, params, shapes, lambda p: not _parameter_of(p, by_path)
    )

    def abstract_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
        if isinstance(leaf, Dealt):
            return leaf.abstract()
        param = _parameter_of(path, by_path)
        shape = tuple(leaf.shape)
        if param is None or shape != param.shape:
            param = _row_of_its_own(plan, shape, param)
        of = everyone if path in unnamed else ""
        spec = param.spec_with_tp(param.placements.optimizer)
        struct = jax.ShapeDtypeStruct(
            param.padded_shape, leaf.dtype, sharding=NamedSharding(plan.mesh, spec)
        )
        return Padded(struct, shape, of) if param.is_padded or of else struct

    return jax.tree_util.tree_map_with_path(
        abstract_leaf, shapes, is_leaf=lambda node: isinstance(node, Dealt)
    )


def _parameter_of(
    path: tuple[Any, ...], by_path: dict[tuple[Any, ...], ParamPlan]
) -> ParamPlan | None:
    # Longest suffix first. optax nests copies of the parameter tree in its own state,
    # so that the path of a moment ends in the path of its parameter.
    suffixes = (path[start:] for start in range(len(path) + 1))
    return next((by_path[suffix] for suffix in suffixes if suffix in by_path), None)


def _row_of_its_own(
    plan: Plan, shape: tuple[int, ...], owner: ParamPlan | None
) -> ParamPlan:
    """Returns the plan of an array that does not have the shape of its parameter.

    The owner is None for an array that belongs to no parameter.
    """
    param = owner or plan.param_plans[0]
    # Also for the arrays of experts: without an expert dim of its own, an array is
    # split over `ep` like any other.
    placements = plan.placements
    if owner is not None and not owner.is_expert:
        placements = owner.placements
    num_shards = num_devices(plan.mesh, placements.optimizer)
    # An array with the stack dim of its parameter is split over the pipeline stages
    # too.
    is_staged = bool(owner and owner.is_staged and shape[:1] == owner.shape[:1])
    if num_shards == 1:
        dim, padding = None, 0
    elif owner and _has_its_split_dim(shape, owner):
        dim, padding = owner.dim, owner.padding
    elif owner:
        dim, padding = choose_split(shape, num_shards, num_stacked=int(is_staged))
    else:
        # The first dim that divides evenly, so that members of a stack stay unsharded.
        # An array without such a dim holds coefficients, not state that grows with the
        # model.
        even = (d for d, size in enumerate(shape) if size and not size % num_shards)
        dim, padding = next(even, None), 0
    if dim is None:
        placements = Placements((), (), ())
    return dataclasses.replace(
        param,
        shape=shape,
        dim=dim,
        padding=padding,
        tensor_dim=None,
        expert_dim=None,
        placements=placements,
        is_staged=is_staged,
        stage_padding=param.stage_padding if is_staged else 0,
    )


def _has_its_split_dim(shape: tuple[int, ...], owner: ParamPlan) -> bool:
    """Returns whether an array differs from its parameter only in unsharded dims.

    Scales of 8-bit moments are such arrays: each scale is stored with its elements.
    """
    dim = owner.dim
    if dim is None or len(shape) != len(owner.shape):
        return False
    return shape[dim] == owner.shape[dim]
