"""A composition on a mesh against the same on one device, in jax and optax alone."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from composition.composed_equinox import equinox_model
from composition.composed_models import (
    DROPPED,
    INPUTS,
    TOKENS,
    Built,
    Tools,
    block_shapes,
    linen_model,
    nnx_model,
    plain,
)
from composition.compositions import PLACEMENTS, STRATEGIES, Composition
from flax import nnx

import fsdp_jax as fsdp

KINDS = ("agree", "refused", "differ")
STEPS, SOWN = 3, 0.1
# float64: what differs is the order of sums. A weight that is cast has a gradient that
# is rounded to its dtype, once for each rank and microbatch here, and once there.
TOLERANCES = {"none": 1e-9, "float32": 1e-5, "bfloat16": 5e-2}

_BUILDERS: dict[str, Callable[..., Built]] = {
    "plain": plain,
    "nnx": nnx_model,
    "linen": linen_model,
    "equinox": equinox_model,
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
      kind: One of `KINDS`.
      error: The largest, relative to the largest element of a leaf.
      says: The refusal, or what differs most.
    """

    kind: str
    error: float
    says: str


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a run gives: names of results to trees of arrays."""

    first: Any
    grads: Any
    losses: Any
    params: Any
    state: Any


def outcome_of(case: Composition) -> Outcome:
    """Runs a case here and there.

    A message of ours is a refusal; another exception is raised as it is.
    """
    with jax.enable_x64(True):
        want = run_plainly(case)
        try:
            got = run_sharded(case)
        except ValueError as refusal:
            return Outcome("refused", 0.0, str(refusal))
        return compare(case, got, want)


def compare(case: Composition, got: Ran, want: Ran) -> Outcome:
    """The largest difference of all results."""
    worst = max(
        (_difference(getattr(got, f.name), getattr(want, f.name)), f.name)
        for f in dataclasses.fields(Ran)
    )
    error, name = worst
    kind = "agree" if error <= TOLERANCES[case.policy] else "differ"
    return Outcome(kind, error, "" if kind == "agree" else name)


def _difference(got: Any, want: Any) -> float:
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    if len(got) != len(want):
        return math.inf
    return max(map(_error, got, want), default=0.0)


def _error(got: Any, want: Any) -> float:
    if jnp.issubdtype(getattr(got, "dtype", float), jax.dtypes.prng_key):
        return 0.0
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    if got.shape != want.shape or not np.isfinite(got).all():
        return math.inf
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-3))


# The loss, on one device and on a mesh


def rows_of(case: Composition) -> dict[str, np.ndarray]:
    """The batch: no two rows alike, and the ranks' differ in size."""
    rows = case.ranks * case.num_microbatches * case.rows_a_rank
    random, shape = np.random.default_rng(0), (rows, TOKENS, INPUTS)
    size = np.linspace(0.5, 2, rows)[:, None, None]
    return {
        "x": random.normal(size=shape) * size,
        "y": random.normal(size=shape),
        "row": np.arange(rows),
        "weight": np.arange(rows) % 3 + 1.0,
    }


def masks_of(case: Composition, row: jax.Array) -> jax.Array:
    shape = (case.layers, 1, block_shapes(case)["bias"][0])
    if not case.dropout:
        return jnp.ones((case.layers, row.shape[0], *shape[1:]))

    def mask(row):
        key = jax.random.fold_in(jax.random.key(5), row)
        return jax.random.bernoulli(key, 1 - DROPPED, shape) / (1 - DROPPED)

    return jax.vmap(mask, out_axes=1)(row)


def loss_of(case: Composition, built: Built) -> Callable[..., Any]:
    """`loss(model, batch) -> (loss or (sum, count), aux, new)`."""

    def loss(model, batch):
        masks = masks_of(case, batch["row"])
        y, balance, new = built.apply(model, batch["x"], masks)
        errors = (y - batch["y"]) ** 2
        value = jnp.mean(errors) + SOWN * case.sow * balance
        if case.per_token:
            weight = jnp.broadcast_to(batch["weight"][:, None, None], errors.shape)
            value = (jnp.sum(errors * weight), jnp.sum(weight))
        return value, _aux(case, y), new

    return loss


def _aux(case: Composition, y: jax.Array) -> Any:
    if not case.aux:
        return {}
    rows = {} if case.axes["cp"] > 1 else {"rows": jnp.mean(y, (1, 2))}
    return {
        **rows,
        "size": jnp.mean(y**2),
        "tokens": jnp.int32(y.shape[0] * y.shape[1]),
    }


def optimizer_of(case: Composition) -> optax.GradientTransformation:
    return {
        # Large eps: what is zero but for rounding is not to be divided by its size.
        "sgd": lambda: optax.sgd(0.1, momentum=0.9),
        "adamw": lambda: optax.adamw(0.01, eps=1e-3, weight_decay=0.1),
        "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=2),
        "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5)),
    }[case.optimizer]()


# On a mesh


def run_sharded(case: Composition) -> Ran:
    """The case with fsdp_jax."""
    built = _BUILDERS[case.framework](case, Tools(fsdp.unit, fsdp.scan), fsdp.Stacked)
    plan = plan_of(case, built)
    inner = loss_of(case, built)

    def loss(model, batch):
        value, aux, new = inner(model, batch)
        if new is not None:
            return value, fsdp.step.UpdatedModel(new, aux)
        return (value, aux) if case.aux else value

    options: dict[str, Any] = {
        "has_aux": case.aux and not (case.norm and case.framework != "nnx"),
        "num_microbatches": case.num_microbatches,
        "calculate_per_token_loss": case.per_token,
    }
    tx, batch = optimizer_of(case), rows_of(case)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    compute = fsdp.value_and_grad(plan, loss, **options)
    (first, aux, *_), grads = compute(
        state.params, batch, model_state=state.model_state
    )
    step = fsdp.make_train_step(plan, loss, tx, **options)
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    aux = aux if case.aux else {}
    return Ran(
        *((first, aux), fsdp.unshard(grads), losses, fsdp.unshard(state.params)),
        state.model_state,
    )


def plan_of(case: Composition, built: Built) -> fsdp.Plan:
    count = math.prod(case.axes.values())
    mesh = fsdp.make_mesh(**case.axes, devices=jax.devices()[:count])
    shapes = jax.eval_shape(lambda: _split(case, _model(built))[0])
    names = [name for name, _ in fsdp.sharding.named_leaves(shapes)]
    options = dict(STRATEGIES[case.strategy])
    if case.strategy == "placed":
        options["placements"] = fsdp.Placements(*PLACEMENTS[case.placement])
    if case.axes["tp"] > 1:
        options["tensor_parallel"] = {n: 1 for n in names if n.split(".")[-1] == "up"}
    if case.axes["cp"] > 1:
        options["context_parallel"] = {"x": 1, "y": 1}
    if case.policy != "none":
        policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.dtype(case.policy))
        options["mp_policy"] = policy
    config = fsdp.FSDPConfig(
        reshard_after_forward=case.reshard,
        overlap_outer=case.overlap,
        frozen=tuple(n for n in names if is_frozen(case, n)),
        **options,
    )
    units = built.units if case.has_units else ()
    return fsdp.fully_shard(built.make, mesh, units, config)


def is_frozen(case: Composition, name: str) -> bool:
    return case.frozen in name


# On one device


def run_plainly(case: Composition) -> Ran:
    """The case with jax and optax alone."""
    built = _BUILDERS[case.framework](case, Tools(lambda fn: fn, scan_plainly), str)
    params, state = jax.jit(lambda: _split(case, _model(built)))()
    frozen = [is_frozen(case, name) for name, _ in fsdp.sharding.named_leaves(params)]
    groups, tx = microbatches(case), optimizer_of(case)
    compute = jax.jit(functools.partial(_grads, case, built))

    @jax.jit
    def update(params, opt, grads):
        own = _trained(params, frozen)
        updates, opt = tx.update(_trained(grads, frozen), opt, own)
        return _with_frozen(optax.apply_updates(own, updates), params, frozen), opt

    opt = tx.init(_trained(params, frozen))
    seen, losses = [], []
    for _ in range(STEPS):
        loss, aux, state, grads = compute(params, state, groups)
        params, opt = update(params, opt, grads)
        seen.append((aux, grads))
        losses.append(loss)
    aux, grads = seen[0]
    grads = _trained(grads, frozen)
    return Ran((losses[0], aux), grads, losses, params, state)


def _model(built: Built) -> Any:
    return built.make(jax.random.key(0))


def microbatches(case: Composition) -> list[dict[str, np.ndarray]]:
    """Rows of each microbatch: of each rank those that are its own then."""

    def cut(rows):
        parts = rows.reshape(
            case.ranks, case.num_microbatches, case.rows_a_rank, *rows.shape[1:]
        )
        return parts.swapaxes(0, 1).reshape(case.num_microbatches, -1, *rows.shape[1:])

    whole = jax.tree.map(cut, rows_of(case))
    return [
        jax.tree.map(lambda x, i=i: x[i], whole) for i in range(case.num_microbatches)
    ]


def _grads(case, built, params, state, groups):
    """Loss, aux, state and gradients of all microbatches, one after the other."""
    inner = loss_of(case, built)

    def of_params(params, state, batch):
        # Made again for what is no array in it; its arrays are not used.
        whole = _merge(case, _model(built), _cast(case, params), state)
        value, aux, new = inner(whole, batch)
        new = _split(case, whole if new is None else new)[1]
        value, count = value if case.per_token else (value, 1.0)
        return value, (count, aux, new)

    outs = []
    for batch in groups:
        compute = jax.value_and_grad(of_params, has_aux=True)
        (value, (count, aux, state)), grads = compute(params, state, batch)
        outs.append((value, count, aux, grads))
    values, counts, auxes, grads = zip(*outs, strict=True)
    mean = functools.partial(_mean, total=sum(counts))
    return mean(*values), _joined_aux(case, auxes), state, mean(*grads)


def _mean(*trees, total):
    return jax.tree.map(lambda *leaves: sum(leaves) / total, *trees)


def _joined_aux(case: Composition, auxes: Any) -> Any:
    """Rows in the order of the batch, the mean of scalars, the sum of counts."""

    def join(*leaves):
        if leaves[0].ndim:
            pieces = jnp.stack(leaves).reshape(case.num_microbatches, case.ranks, -1)
            return pieces.swapaxes(0, 1).reshape(-1)
        is_count = jnp.issubdtype(leaves[0].dtype, jnp.integer)
        return sum(leaves) if is_count else sum(leaves) / len(leaves)

    return jax.tree.map(join, *auxes)


def _cast(case: Composition, params: Any) -> Any:
    dtype = None if case.policy == "none" else jnp.dtype(case.policy)
    return jax.tree.map(lambda x: x if dtype is None else x.astype(dtype), params)


def _trained(tree: Any, frozen: list[bool]) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    pairs = zip(leaves, frozen, strict=True)
    return treedef.unflatten(None if is_frozen else x for x, is_frozen in pairs)


def _with_frozen(new: Any, old: Any, frozen: list[bool]) -> Any:
    given, (leaves, treedef) = iter(jax.tree.leaves(new)), jax.tree.flatten(old)
    pairs = zip(leaves, frozen, strict=True)
    return treedef.unflatten(x if is_frozen else next(given) for x, is_frozen in pairs)


def _split(case: Composition, model: Any) -> tuple[Any, Any]:
    """(parameters, other arrays) of a model."""
    if case.framework == "nnx":
        return nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))
    if case.framework == "linen":
        params = {n: model[n] for n in ("params", "root") if n in model}
        return params, {n: model[n] for n in ("batch_stats",) if n in model}
    if case.framework == "equinox" and case.norm:
        return (eqx.filter(model[0], eqx.is_inexact_array), None), model[1]
    if case.framework == "equinox":
        return eqx.filter(model, eqx.is_inexact_array), {}
    return model, {}


def _merge(case: Composition, model: Any, params: Any, state: Any) -> Any:
    if case.framework == "nnx":
        return nnx.merge(nnx.graphdef(model), params, state)
    if case.framework == "linen":
        return {**params, **state}
    if case.framework == "equinox" and case.norm:
        return eqx.combine(params[0], model[0]), state
    return eqx.combine(params, model)


def scan_plainly(unit, stacked, carry, xs=(), *, prefetch=0, unroll=1):
    """The loop over layers in jax alone."""
    del prefetch, unroll
    if not isinstance(stacked, nnx.Module):
        return jax.lax.scan(lambda c, s: unit(s[0], c, *s[1]), carry, (stacked, xs))
    graph, state = nnx.split(stacked)

    def body(carry, slices):
        return unit(nnx.merge(graph, slices[0]), carry, *slices[1])

    return jax.lax.scan(body, carry, (state, xs))
