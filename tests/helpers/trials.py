"""Laws of sharded training that hold for any model, whoever wrote it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from helpers.compare import worst

import fsdp_jax as fsdp

STEPS = 3
LEARNING_RATE = 0.1
# Eight devices and one, in float32, differ by the order of summation; three steps of
# training enlarge that.
RTOL = 2e-5


@dataclasses.dataclass(frozen=True)
class Trial:
    """A model, its units, its loss and a batch.

    Attributes:
      make_model: Function of a PRNG key that returns the model.
      units: What `fully_shard` takes.
      loss: `loss(model, batch)`.
      batch: Global batch.
    """

    make_model: Callable[[jax.Array], Any]
    units: tuple[Any, ...]
    loss: Callable[[Any, Any], Any]
    batch: Any

    def plan(self, config: fsdp.FSDPConfig | None = None, **mesh: Any) -> fsdp.Plan:
        return fsdp.fully_shard(
            perturbed(self.make_model),
            fsdp.make_mesh(**mesh),
            self.units,
            config or fsdp.FSDPConfig(),
        )


def perturbed(make_model: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """The model with noise on its weights: those that begin at zero hide others."""

    def noisy(key, tree):
        leaves, treedef = jax.tree.flatten(tree)
        return treedef.unflatten(
            x + 0.05 * jax.random.normal(jax.random.fold_in(key, i), x.shape, x.dtype)
            if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
            else x
            for i, x in enumerate(leaves)
        )

    def make(key):
        model = make_model(key)
        if not isinstance(model, nnx.Module):
            return noisy(key, model)
        nnx.update(model, noisy(key, nnx.state(model, nnx.Param)))
        return model

    return make


@dataclasses.dataclass(frozen=True)
class Trained:
    """What three steps on eight devices leave, and the same on one, of jax alone."""

    plan: fsdp.Plan
    step: fsdp.training._train_step.TrainStep
    state: fsdp.TrainState
    losses: list[float]
    plain_losses: list[float]
    updates: Any
    plain_updates: Any


def train(trial: Trial) -> Trained:
    plan, tx = trial.plan(), optax.sgd(LEARNING_RATE)
    params = fsdp.init_params(plan, jax.random.key(0))
    first = jax.device_get(fsdp.unshard(params))
    state = fsdp.init_state(plan, tx, params)
    step = fsdp.make_train_step(plan, trial.loss, tx)
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, trial.batch)
        losses.append(float(metrics["loss"]))
    plain_losses, last = _train_plain(trial, plan, first)
    stored = fsdp.sharding.unpack(state.params)
    updates = jax.tree.map(np.subtract, jax.device_get(fsdp.unshard(stored)), first)
    plain_updates = jax.tree.map(np.subtract, last, first)
    return Trained(plan, step, state, losses, plain_losses, updates, plain_updates)


def _train_plain(trial: Trial, plan: fsdp.Plan, params: Any) -> tuple[list[float], Any]:
    """The same steps by jax alone, on one device and without units."""
    _, state = plan.model.split(trial.make_model(jax.random.key(0)))

    @jax.jit
    def step(params):
        def loss(params):
            return trial.loss(plan.model.merge(params, state), trial.batch)

        value, grads = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)

    losses = []
    for _ in range(STEPS):
        loss, params = step(params)
        losses.append(float(loss))
    return losses, jax.device_get(params)


def check_numbers(trained: Trained) -> None:
    """Loss of each step, and the sum of the gradients of all of them."""
    np.testing.assert_allclose(trained.losses, trained.plain_losses, rtol=RTOL)
    got, want = map(jax.tree.leaves, (trained.updates, trained.plain_updates))
    norms = [float(np.linalg.norm(leaf)) for leaf in want]
    # Some have a gradient of zero, such as the bias of attention's keys.
    floor = 1e-3 * float(np.linalg.norm(norms))
    for a, b, norm in zip(got, want, norms, strict=True):
        assert float(np.linalg.norm(a - b)) < 50 * RTOL * (norm + floor)


def check_stored(trained: Trained) -> None:
    """Each device stores its share of the parameters, and at most padding more."""
    leaves = jax.tree.leaves(trained.state.params)
    stored = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    whole = sum(math.prod(p.shape) * 4 for p in trained.plan.param_plans)
    assert stored < 1.1 * whole / trained.plan.mesh.size + 1024


def check_saved(trial: Trial, trained: Trained, folder: Path) -> None:
    """A step goes on from what was saved, on half of the devices."""
    tx = optax.sgd(LEARNING_RATE)
    fsdp.save(folder / "step", trained.state)
    half = trial.plan(devices=jax.devices()[:4])
    loaded = fsdp.load(folder / "step", fsdp.abstract_state(half, tx))
    before = fsdp.unshard(fsdp.sharding.unpack(trained.state.params))
    after = fsdp.unshard(fsdp.sharding.unpack(loaded.params))
    assert worst(after, before) == 0
    evaluate = fsdp.make_eval_step(trained.plan, trial.loss)
    want = evaluate(fsdp.sharding.unpack(trained.state.params), trial.batch)["loss"]
    again = fsdp.make_eval_step(half, trial.loss)
    got = again(fsdp.sharding.unpack(loaded.params), trial.batch)["loss"]
    np.testing.assert_allclose(got, want, rtol=RTOL)


def check_audit(trial: Trial, trained: Trained) -> None:
    """The compiled step does what its plan says."""
    state = fsdp.abstract_state(trained.plan, optax.sgd(LEARNING_RATE))
    lowered = trained.step.lower(state, trial.batch)
    fsdp.audit_step(trained.plan, lowered.compile())


def check_lora(trial: Trial, targets: Sequence[Any]) -> None:
    """Loss and gradients of factors are those of the sum of weights on one device."""
    lora = fsdp.LoRAConfig(4, list(targets), alpha=8)
    plan = trial.plan(fsdp.FSDPConfig(lora=lora))
    params = fsdp.init_params(plan, jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 99))
    # Factors whose product is not zero, as it is at first.
    factors = jax.tree.map(
        lambda x: jax.device_put(
            0.1 * jax.random.normal(next(keys), x.shape), x.sharding
        ),
        params["lora"],
    )
    assert factors
    _, state = trial.plan().model.split(trial.make_model(jax.random.key(0)))
    compute = fsdp.value_and_grad(plan, trial.loss)
    (value, _), grads = compute(params | {"lora": factors}, trial.batch)

    @jax.jit
    @jax.value_and_grad
    def loss(factors, base):
        return trial.loss(
            plan.model.merge({"base": base, "lora": factors}, state), trial.batch
        )

    want, wanted = loss(jax.device_get(factors), jax.device_get(params["base"]))
    np.testing.assert_allclose(value, want, rtol=RTOL)
    pairs = zip(jax.tree.leaves(grads["lora"]), jax.tree.leaves(wanted), strict=True)
    for got, one in pairs:
        norm = float(np.linalg.norm(one))
        assert float(np.linalg.norm(jax.device_get(got) - one)) < 50 * RTOL * norm
