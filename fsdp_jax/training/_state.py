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

from fsdp_jax._tree import PyTree
from fsdp_jax.sharding._ambient_mesh import in_own_mesh
from fsdp_jax.sharding._attributes import trace_model
from fsdp_jax.sharding._offload import (
    abstract_on_host,
    optimizer_on_host,
    params_on_host,
)
from fsdp_jax.sharding._padded import Padded, pack, unpack
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.training._loss_scale import LossScale, ScaleState
from fsdp_jax.training._opt_state_layout import abstract_opt_state
from fsdp_jax.training._optimizer import check_optimizer
from fsdp_jax.training._state_check import check_fits, check_key, check_opt_state
from fsdp_jax.training._trainable import seen_by_optimizer


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        *("step", "params", "opt_state", "model_state", "key", "num_skipped"),
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
      key: PRNG key from which each step, microbatch and data rank derives its own.
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
    key: Key[Array, ""]
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

    Raises:
      ValueError: If `key` is not a PRNG key.

    Examples:
      >>> params = fsdp.init_params(plan, jax.random.key(0))
      >>> params["head"].addressable_shards[0].data.shape
      (2, 16)
    """
    check_key(key, "init_params")

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
    key: Key[Array, ""] | None = None,
    model_state: PyTree | None = None,
    opt_state: PyTree | None = None,
    step: int = 0,
    loss_scale: LossScale | None = None,
) -> TrainState:
    """Makes the initial training state, with optimizer state sharded like `params`.

    The optimizer state may come from elsewhere, such as the moments of a run that began
    in Megatron: `optax.tree.set(tx.init(params), mu=mu, nu=nu, count=count)`, whose
    count is an array, `jnp.int32(1000)`.

    Args:
      plan: Plan from `fully_shard`.
      tx: Any optax transformation.
      params: Parameters that match `plan.params`, from `init_params` or a checkpoint.
        The state takes ownership of them: the first step donates them.
      key: PRNG key of dropout and other randomness; default `jax.random.key(0)`.
      model_state: Arrays of the model that are not parameters, matching
        `plan.model_state`, e.g. BatchNorm statistics of a trained model. None for those
        that `make_model(key)` makes.
      opt_state: State of `tx` for these `params`, plain arrays in their logical shapes
        with any sharding. None for that of `tx.init`.
      step: Number of steps made so far, where `opt_state` is that of a run.
      loss_scale: Loss scale passed to `make_train_step`, if any.

    Returns:
      State for `make_train_step`.

    Raises:
      ValueError: If `params`, `opt_state` or `model_state` does not fit the plan; each
        message lists all offenders of one tree. If `key` is not a PRNG key.

    Examples:
      >>> state = fsdp.init_state(plan, tx, params)
      >>> state.opt_state[0].mu["head"].sharding == params["head"].sharding
      True
    """
    check_optimizer(tx)
    check_fits(params, plan.params, "params")
    if key is not None:
        check_key(key, "init_state")
    if opt_state is not None:
        check_opt_state(plan, tx, opt_state)
    if model_state is not None:
        check_fits(model_state, plan.model_state, "model_state")
    key = jax.random.key(0) if key is None else key
    abstract = abstract_state(plan, tx, loss_scale)

    def rest(params, key, model_state, opt_state):
        if model_state is None:
            _, model_state = plan.model.split(trace_model(plan.make_model, key))
        # A step returns them strongly typed, and would be compiled for both types.
        model_state = jax.tree.map(_strongly_typed, model_state)
        zero = jnp.zeros((), jnp.int32)
        # Copied, since the state is donated and must not delete the caller's key.
        key = jax.random.wrap_key_data(
            jax.random.key_data(key), impl=jax.random.key_impl(key)
        )
        if opt_state is None:
            opt_state = tx.init(seen_by_optimizer(plan, params))
        opt_state = pack(opt_state, abstract.opt_state)
        scale = None if loss_scale is None else loss_scale.start()
        return zero + step, opt_state, model_state, key, zero, scale

    def sharding_of(tree):
        return jax.tree.map(lambda leaf: leaf.sharding, tree)

    wanted = (abstract.step, abstract.opt_state, abstract.model_state, abstract.key)
    wanted = (*wanted, abstract.num_skipped, abstract.loss_scale)
    # One jit with output shardings: each device computes only its own shards.
    make_rest = jax.jit(rest, out_shardings=sharding_of(wanted))
    made, opt_state, *others = make_rest(params, key, model_state, opt_state)
    if any(param.is_padded for param in plan.param_plans):
        params = _pack_each(plan, params)
    if plan.config.offload and plan.config.offload.params:
        params = jax.device_put(params, sharding_of(abstract.params))
    return TrainState(made, params, opt_state, *others)


def _strongly_typed(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return jax.lax.convert_element_type(leaf, leaf.dtype)


def _pack_each(plan: Plan, params: PyTree) -> PyTree:
    """Pads the parameters stored padded; returns all others uncopied."""

    def as_stored(leaf, abstract):
        if not isinstance(abstract, Padded):
            return leaf
        # One jit per padded leaf: a jit over the tree would copy the unpadded leaves.
        packing = functools.partial(pack, like=abstract)
        return jax.jit(packing, out_shardings=abstract.value.sharding)(leaf)

    abstracts = plan.treedef.flatten_up_to(plan.packed_params)
    leaves = plan.treedef.flatten_up_to(params)
    return plan.treedef.unflatten(map(as_stored, leaves, abstracts))


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

    Raises:
      ValueError: If `loss_scale` is no `LossScale`.

    Examples:
      >>> state = fsdp.abstract_state(plan, tx)
      >>> head = state.params["head"]
      >>> head.shape, head.sharding.shard_shape(head.shape)
      ((16, 16), (2, 16))
    """
    if loss_scale is not None and not isinstance(loss_scale, LossScale):
        raise ValueError(
            f"loss_scale={loss_scale!r} is no LossScale: pass "
            "fsdp_jax.training.LossScale(...), or scale the loss by a constant."
        )
    replicated = NamedSharding(plan.mesh, PartitionSpec())
    key = jax.eval_shape(lambda: jax.random.key(0))

    offload = plan.config.offload

    def scalar(dtype) -> Any:
        return jax.ShapeDtypeStruct((), dtype, sharding=replicated)

    params, opt_state = plan.packed_params, abstract_opt_state(plan, tx)
    return TrainState(
        step=scalar(jnp.int32),
        params=abstract_on_host(params_on_host(offload, params), params),
        opt_state=abstract_on_host(optimizer_on_host(offload, opt_state), opt_state),
        model_state=plan.model_state,
        key=scalar(key.dtype),
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
    replicated = NamedSharding(leaf.sharding.mesh, PartitionSpec())
    return jax.device_put(leaf, replicated)
