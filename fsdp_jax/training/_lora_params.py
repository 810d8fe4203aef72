"""Parameters of a plan with LoRA: create, merge, and save without frozen parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from fsdp_jax._tree import PyTree
from fsdp_jax.sharding._fully_shard import choose_split
from fsdp_jax.sharding._mesh import num_devices
from fsdp_jax.sharding._padded import pack, unpack
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.training._state import TrainState
from fsdp_jax.training._state_check import check_fits
from fsdp_jax.training._trainable import trainable


def abstract_base_params(plan: Plan) -> PyTree:
    """Returns the abstract parameters of the user's own model under a plan with LoRA.

    Load a model into this tree. Leaves are those of `plan.params["base"]`; a weight
    that is stored quantized appears in its compute dtype.
    """
    _refuse_without_lora(plan, "abstract_base_params")
    treedef = jax.tree.structure(plan.model.adapted.model.params)
    stored = treedef.flatten_up_to(plan.params["base"])
    pairs = zip(plan.model.adapted.weights.values(), stored, strict=True)
    return treedef.unflatten(
        leaf if leaf is not None else _struct(plan, weight) for weight, leaf in pairs
    )


def add_lora(
    plan: Plan,
    base: PyTree,
    key: Key[Array, ""] | None = None,
    *,
    factors: PyTree | None = None,
) -> PyTree:
    """Builds the parameters of a plan with LoRA from those of the base model.

    Args:
      plan: Plan with `FSDPConfig(lora=...)`.
      base: Parameters of the base model, matching `abstract_base_params(plan)`.
        Weights that are stored unquantized are reused, not copied.
      key: PRNG key to draw the factors; their product is zero for every key.
      factors: Factors to use instead of `key`: `{path: {"lora_a", "lora_b"}}`, as in
        `bridge.load_lora(...).factors`.

    Returns:
      Parameters that match `plan.params`, for `init`.

    Raises:
      ValueError: If `base` or `factors` do not fit the plan, or not exactly one of
        `key` and `factors` is given.
    """
    check_fits(base, abstract_base_params(plan), "base")
    if (key is None) == (factors is None):
        raise ValueError("add_lora takes either a key, to draw factors, or factors.")
    if factors is not None:
        factors = jax.tree.map(jax.device_put, factors, _placed(plan, factors))

    def make(base, key, factors):
        made = plan.model.adapted.complete(base, key, factors)
        return {
            name: jax.tree.map(lambda x, m: x.astype(m.dtype), made[name], abstract)
            for name, abstract in wanted.items()
        }

    wanted = {name: tree for name, tree in plan.params.items() if name != "base"}
    shardings = jax.tree.map(lambda abstract: abstract.sharding, wanted)
    key = jax.random.key(0) if key is None else key
    made = jax.jit(make, out_shardings=shardings)(base, key, factors)
    weights = zip(
        plan.model.adapted.weights.values(), jax.tree.leaves(base), strict=True
    )
    kept = [leaf for weight, leaf in weights if not weight.recipe.form]
    stored = jax.tree.structure(plan.params["base"])
    return {"base": stored.unflatten(kept), **made}


def merge_lora(plan: Plan, params: PyTree, dtype: DTypeLike | None = None) -> PyTree:
    """Returns the user's parameters with the factors merged in: `w + scale * a @ b`.

    Args:
      plan: Plan with `FSDPConfig(lora=...)`.
      params: Parameters of the plan, or those of its `TrainState`.
      dtype: Dtype of weights that have factors or were stored quantized; the sum is
        computed in float32 and rounded once. None for the compute dtype.

    Returns:
      A tree like `abstract_base_params(plan)`, with its shardings.
    """
    abstract = abstract_base_params(plan)
    treedef = jax.tree.structure(plan.model.adapted.model.params)
    parts = plan.model.adapted.parts(unpack(params))
    merged = []
    for (name, own), like in zip(parts.items(), jax.tree.leaves(abstract), strict=True):
        weight = plan.model.adapted.weights[name]
        if weight.is_plain:
            merged.append(own[0])
        else:

            def total(parts, weight=weight):
                return weight.total(parts, dtype)

            merged.append(jax.jit(total, out_shardings=like.sharding)(own))
    return treedef.unflatten(merged)


def trained_state(plan: Plan, state: TrainState) -> TrainState:
    """Returns the state with None in place of frozen parameters: the part worth saving.

    Args:
      plan: Plan with `frozen` or `lora`.
      state: State of arrays, or an abstract state to load a saved one into.
    """
    return dataclasses.replace(state, params=trainable(plan, state.params))


def with_frozen(plan: Plan, state: TrainState, params: PyTree) -> TrainState:
    """Restores the frozen parameters of a state from `trained_state`.

    Args:
      plan: Plan of the state, on any mesh.
      state: State loaded into `trained_state(plan, abstract_state(plan, tx))`.
      params: Parameters that match `plan.params`; only frozen ones are read.

    Raises:
      ValueError: If `params` does not fit the plan.
    """
    check_fits(params, plan.params, "params")
    packed = plan.treedef.flatten_up_to(pack(params, plan.packed_params))
    trained = plan.treedef.flatten_up_to(state.params)
    pairs = zip(plan.param_plans, trained, packed, strict=True)
    leaves = [given if param.is_frozen else own for param, own, given in pairs]
    return dataclasses.replace(state, params=plan.treedef.unflatten(leaves))


def _struct(plan: Plan, weight: Any) -> jax.ShapeDtypeStruct:
    """Returns the abstract array of a quantized weight, sharded as if unquantized."""
    axes = plan.placements.optimizer
    num_shards = num_devices(plan.mesh, axes)
    dim, padding = choose_split(
        weight.shape, num_shards, num_stacked=weight.num_stacked
    )
    split = () if dim is None or padding or not axes else (*(None,) * dim, axes)
    sharding = NamedSharding(plan.mesh, PartitionSpec(*split))
    return jax.ShapeDtypeStruct(weight.shape, weight.recipe.dtype, sharding=sharding)


def _placed(plan: Plan, factors: PyTree) -> PyTree:
    """Returns the shardings of factors; raises a `ValueError` if these do not fit."""
    abstract = plan.params["lora"]
    have = {n: {p: x.shape for p, x in pair.items()} for n, pair in factors.items()}
    want = {n: {p: x.shape for p, x in pair.items()} for n, pair in abstract.items()}
    if have != want:
        wrong = [n for n in {*have, *want} if have.get(n) != want.get(n)]
        lines = [f"  {n}: {have.get(n)}, planned {want.get(n)}" for n in sorted(wrong)]
        raise ValueError("The factors are not those of the plan:\n" + "\n".join(lines))
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def _refuse_without_lora(plan: Plan, what: str) -> None:
    if plan.config.lora is None:
        raise ValueError(f"{what}(plan): the plan has no FSDPConfig(lora=...).")
