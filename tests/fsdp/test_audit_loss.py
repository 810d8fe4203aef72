"""`audit_loss` passes a loss that is one device's on any mesh, and refuses others."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.errors import facts

import fsdp_jax as fsdp
from fsdp_jax.audit import audit_loss

DATA = ("dp_outer", "dp_shard", "ep")
WIDTH, ROWS = 6, 16
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(ROWS, WIDTH)).astype(np.float32),
    "y": RNG.normal(size=(ROWS, WIDTH)).astype(np.float32),
    "weight": RNG.uniform(size=ROWS).astype(np.float32),
}


class Block(nnx.Module):
    def __init__(self, rngs, normed=False):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs) if normed else None

    def __call__(self, x):
        x = jnp.tanh(self.linear(x))
        return x if self.norm is None else self.norm(x)


class Model(nnx.Module):
    def __init__(self, key, normed=False):
        rngs = nnx.Rngs(key)
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, normed) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plan_of(make=Model, config=None, **axes):
    return fsdp.fully_shard(make, fsdp.make_mesh(**axes), [Block], config=config)


def errors(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=-1)


def mean(model, batch):
    return jnp.mean(errors(model, batch))


def contrastive(model, batch, gather=lambda x: x):
    first, second = model(batch["x"]), gather(model(batch["y"]))
    logits = first @ second.T
    here = len(first) * jax.lax.axis_index(DATA) if len(second) > len(first) else 0
    own = here + jnp.arange(len(first))
    picked = jnp.take_along_axis(logits, own[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked)


def gathered_contrastive(model, batch):
    def of_all_rows(x):
        return jax.lax.all_gather(x, DATA, tiled=True)

    return contrastive(model, batch, of_all_rows)


def variance(model, batch, average=lambda x: x):
    y = model(batch["x"])
    return average(jnp.mean(y**2)) - average(jnp.mean(y)) ** 2


def variance_of_all(model, batch):
    return variance(model, batch, lambda x: jax.lax.pmean(x, DATA))


def weighted(model, batch):
    return jnp.sum(errors(model, batch) * batch["weight"]) / jnp.sum(batch["weight"])


def total(model, batch):
    return jnp.sum(errors(model, batch))


@pytest.mark.parametrize("loss", [mean, gathered_contrastive, variance_of_all])
def test_a_mean_and_what_gathers_all_rows_are_those_of_one_device(loss):
    audited = audit_loss(plan_of(), loss, BATCH)
    assert audited.loss == pytest.approx(audited.loss_on_one_device, rel=1e-5)
    assert set(audited.grad_differences) == {p.name for p in plan_of().param_plans}
    assert max(audited.grad_differences.values()) < 1e-4  # the order of sums
    assert f"{audited.loss:.6g}" in str(audited)


@pytest.mark.parametrize("loss", [contrastive, variance, weighted])
def test_what_looks_at_several_rows_of_its_rank_is_refused(loss):
    names = [param.name for param in plan_of().param_plans]
    names.remove("head.bias")  # A variance has no gradient of it.
    told = "8 devices", "2 of 16 rows", "all_gather", "sum, count"
    with pytest.raises(ValueError, match=facts(*names, *told)):
        audit_loss(plan_of(), loss, BATCH)


def test_a_sum_is_refused_with_its_number_of_ranks():
    with pytest.raises(ValueError, match=facts("4 data", "4 times", "divide")):
        audit_loss(plan_of(devices=jax.devices()[:4]), total, BATCH)


def test_a_weighted_mean_of_all_tokens_passes_as_sum_and_count():
    def loss(model, batch):
        weight = batch["weight"]
        return jnp.sum(errors(model, batch) * weight), jnp.sum(weight)

    audit_loss(plan_of(), loss, BATCH, calculate_per_token_loss=True)


@pytest.mark.parametrize("axes", [{"dp_outer": 2}, {"tp": 2}, {"dp_outer": 4}], ids=str)
def test_any_mesh_is_compared(axes):
    config = fsdp.FSDPConfig(
        outer_dp_sharding_strategy=int(axes.get("dp_outer") == 4),
        tensor_parallel={"head.kernel": 1} if "tp" in axes else {},
    )
    audit_loss(plan_of(config=config, **axes), mean, BATCH)
    with pytest.raises(ValueError, match=facts("head.kernel")):
        audit_loss(plan_of(config=config, **axes), variance, BATCH)


def test_stages_are_compared():
    def make(key):
        return {"layers": jax.random.normal(key, (4, WIDTH, WIDTH)) / 2}

    def run(model, batch):
        def layer(weight, x):
            return jnp.tanh(x @ weight), None

        return fsdp.scan(layer, model["layers"], batch["x"])[0]

    mesh = fsdp.make_mesh(pp=2)
    config = fsdp.FSDPConfig(pipeline=fsdp.PipelineConfig(virtual_stages=2))
    plan = fsdp.fully_shard(make, mesh, [fsdp.Stacked("layers")], config=config)
    audit_loss(plan, lambda m, b: jnp.mean((run(m, b) - b["y"]) ** 2), BATCH)
    with pytest.raises(ValueError, match=facts("layers", "4 data", "4 of 16 rows")):
        audit_loss(plan, lambda m, b: jnp.max(run(m, b)), BATCH)


@pytest.mark.parametrize("is_synced", [True, False])
def test_a_batch_norm_of_its_own_rows_is_another_model(is_synced):
    config = fsdp.FSDPConfig(sync_batch_norm=is_synced)
    plan = plan_of(lambda key: Model(key, normed=True), config)
    if is_synced:
        audit_loss(plan, mean, BATCH)
        return
    with pytest.raises(ValueError, match=facts("blocks.0.norm.scale")):
        audit_loss(plan, mean, BATCH)


def whole(make, config=None):
    return fsdp.fully_shard(make, fsdp.make_mesh(), config=config)


class Noting(nnx.Module):
    """Writes what it sees of its rows to arrays that are not parameters."""

    def __init__(self, key, count=nnx.Variable):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(key))
        self.rows = count(jnp.zeros((), jnp.int32))
        self.sum = count(jnp.zeros(WIDTH))
        self.mean = nnx.Variable(jnp.zeros(WIDTH))
        self.largest = nnx.Variable(jnp.zeros(()))

    def __call__(self, x, over_ranks=lambda x: x):
        self.rows[...] += len(x)
        self.sum[...] += x.sum(0)
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean(0)
        self.largest[...] = over_ranks(jnp.abs(x).max())
        return self.linear(x)


def test_a_model_that_writes_other_than_means_is_refused():
    with pytest.raises(
        ValueError, match=facts("'rows'", "'sum'", "'largest'", "Tally", "pmax")
    ) as found:
        audit_loss(whole(Noting), mean, BATCH)
    assert "'mean'" not in str(found.value)  # What ranks average is one device's.
    assert "gradient" not in str(found.value)


def test_tallies_and_what_is_alike_on_all_ranks_pass():
    def noted(model, batch):
        y = model(batch["x"], lambda x: jax.lax.pmax(x, DATA))
        return jnp.mean((y - batch["y"]) ** 2)

    plan = whole(functools.partial(Noting, count=fsdp.step.Tally))
    found = audit_loss(plan, noted, BATCH)
    assert found.state_differences.keys() == {"rows", "sum", "mean", "largest"}
    assert max(found.state_differences.values()) < 1e-5
    assert "model state within" in str(found)


def test_what_a_narrow_array_rounds_is_no_difference():
    def noted(model, batch):
        model.half[...] = (0.9 * model.half[...] + batch["x"].mean(0)).astype(
            jnp.bfloat16
        )
        return mean(model.linear, batch)

    class Half(nnx.Module):
        def __init__(self, key):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(key))
            self.half = nnx.Variable(jnp.ones(WIDTH, jnp.bfloat16))

    assert audit_loss(whole(Half), noted, BATCH).state_differences == {"half": 0.0}


class BiasBeforeNorm(nnx.Module):
    """Its bias has no gradient but rounding."""

    def __init__(self, key):
        rngs = nnx.Rngs(key)
        self.linear = nnx.Linear(WIDTH, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.out = nnx.Linear(64, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.linear(x))))


def test_rounding_in_place_of_no_gradient_passes_in_bfloat16():
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    plan = whole(BiasBeforeNorm, fsdp.FSDPConfig(mp_policy=policy))
    assert "norm.mean" in audit_loss(plan, mean, BATCH).state_differences
    with pytest.raises(ValueError, match=facts("'linear.kernel'")):
        audit_loss(plan, contrastive, BATCH)


def test_parameters_and_the_tolerance_can_be_given():
    plan = plan_of()
    params = fsdp.init_params(plan, jax.random.key(7))
    (loss, _), _ = fsdp.value_and_grad(plan, mean)(params, BATCH)
    audited = audit_loss(plan, mean, BATCH, params=params)
    assert audited.loss == float(loss)
    with pytest.raises(ValueError, match=facts("head.kernel", "norm")):
        audit_loss(plan, mean, BATCH, params=params, rtol=0.0)
    audit_loss(plan, weighted, BATCH, params=params, rtol=2.0)


def test_a_plan_in_bfloat16_is_compared_less_closely():
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    plan = plan_of(config=fsdp.FSDPConfig(mp_policy=policy))
    audited = audit_loss(plan, mean, BATCH)
    assert max(audited.grad_differences.values()) < 5e-2
    with pytest.raises(ValueError, match=facts("head.kernel")):
        audit_loss(plan, variance, BATCH)


def test_aux_and_frozen_parameters_are_not_compared():
    plan = plan_of(config=fsdp.FSDPConfig(frozen=("head",)))
    audited = audit_loss(
        plan, lambda m, b: (mean(m, b), total(m, b)), BATCH, has_aux=True
    )
    assert not any(name.startswith("head") for name in audited.grad_differences)


def test_noise_is_said_to_differ_from_mesh_to_mesh():
    def noisy(model, batch, key):
        noise = jax.random.normal(key, batch["x"].shape)
        return mean(model, {**batch, "x": batch["x"] + noise})

    with pytest.raises(ValueError, match=facts("deterministic=True")):
        audit_loss(plan_of(), noisy, BATCH)


def test_a_loss_that_is_nan_does_not_pass():
    with pytest.raises(ValueError, match=facts("nan")):
        audit_loss(plan_of(), lambda m, b: mean(m, b) * jnp.nan, BATCH)


def test_a_mesh_of_one_device_has_nothing_to_compare():
    alone = fsdp.make_mesh(devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=facts("1 device", "jax_num_cpu_devices")):
        audit_loss(fsdp.fully_shard(Model, alone, [Block]), mean, BATCH)
