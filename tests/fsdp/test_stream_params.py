"""Weights streamed from the host: the same numbers, and what cannot be streamed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import host
from helpers.errors import facts

import fsdp_jax as fsdp

# Half of a number is exact, so that no order of these operations changes a bit.
TX = optax.sgd(0.5, momentum=0.5)
LAYERS, EMBED, MLP, ROWS = 4, 16, 32, 16
WHOLE = fsdp.OffloadPolicy(params=True, min_elements=100)
STREAM = fsdp.OffloadPolicy(params=True, min_elements=100, stream_params=True)
UNITS = (fsdp.Stacked("layers"),)
BF16 = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)


def make_weights(key):
    up, down, head = jax.random.split(key, 3)
    return {
        "layers": {
            "up": 0.3 * jax.random.normal(up, (LAYERS, EMBED, MLP)),
            "down": 0.3 * jax.random.normal(down, (LAYERS, MLP, EMBED)),
            "norm": jnp.ones((LAYERS, EMBED)),
        },
        "head": 0.3 * jax.random.normal(head, (EMBED, 8)),
    }


def layer(w, x):
    return x + jnp.tanh((x * w["norm"][None]) @ w["up"]) @ w["down"], None


def loss_fn(weights, batch, **options):
    x = batch["x"].astype(weights["head"].dtype)
    x, _ = fsdp.scan(layer, weights["layers"], x, **options)
    return jnp.mean((x @ weights["head"] - batch["y"]).astype(jnp.float32) ** 2)


def features(weights, batch):
    x = batch["x"].astype(weights["head"].dtype)
    return fsdp.scan(layer, weights["layers"], x)[0]


def asked_of_the_scan(weights, batch):
    return loss_fn(weights, batch, prefetch=2)


def gathered_when_it_begins(weights, batch):
    return loss_fn(weights, batch, prefetch=0)


def unrolled_by_hand(weights, batch):
    x = batch["x"].astype(weights["head"].dtype)
    for i in range(LAYERS):
        own = jax.tree.map(lambda w, i=i: w[i], weights["layers"])
        x, _ = fsdp.unit(layer)(own, x)
    return jnp.mean((x @ weights["head"]).astype(jnp.float32))


def scanned_by_jax(weights, batch):
    x, _ = jax.lax.scan(
        lambda x, w: fsdp.unit(layer)(w, x), batch["x"], weights["layers"]
    )
    return jnp.mean((x @ weights["head"] - batch["y"]) ** 2)


def rows():
    random = np.random.default_rng(0)
    shapes = {"x": (ROWS, EMBED), "y": (ROWS, 8)}
    return {k: random.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def plan_of(offload, devices=8, units=UNITS, **config):
    config = {"mp_policy": BF16} | config
    mesh = fsdp.make_mesh(devices=jax.devices()[:devices])
    return fsdp.fully_shard(
        make_weights, mesh, units, fsdp.FSDPConfig(offload=offload, **config)
    )


def trained(plan, loss, **options):
    step = fsdp.make_train_step(plan, loss, TX, **options)
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    for _ in range(2):
        state, metrics = step(state, rows())
    return host(state.params), host(state.opt_state), host(metrics)


CASES = {
    "bfloat16": ({}, loss_fn, {}),
    "the scan asks for two ahead": ({}, asked_of_the_scan, {}),
    "jax.lax.scan, float32": (
        {"mp_policy": fsdp.MixedPrecisionPolicy()},
        scanned_by_jax,
        {},
    ),
    "microbatches": ({}, loss_fn, {"num_microbatches": 2}),
    "one device": ({"devices": 1}, loss_fn, {}),
    "frozen layers": ({"frozen": ("layers.*",)}, loss_fn, {}),
    "LoRA": ({"lora": fsdp.LoRAConfig(rank=2, targets=("layers.up",))}, loss_fn, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_the_same_to_the_bit(case):
    config, loss, options = CASES[case]
    want, got = (
        trained(plan_of(offload, **config), loss, **options)
        for offload in (WHOLE, STREAM)
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_evaluation_and_forward_stream_too():
    losses, outputs = [], []
    for offload in (WHOLE, STREAM):
        plan = plan_of(offload)
        params = fsdp.init_params(plan, jax.random.key(0))
        evaluate = fsdp.make_eval_step(plan, loss_fn)
        forward = fsdp.make_forward(plan, features)
        losses.append(float(evaluate(params, rows())["loss"]))
        outputs.append(np.asarray(forward(params, rows())))
    assert losses[0] == losses[1]
    np.testing.assert_array_equal(*outputs)


def test_the_stacks_stay_on_the_host_and_slices_are_copied():
    # With rows on a device the loop holds no stack there, but slices of one unit.
    counts = {}
    for offload in (WHOLE, STREAM):
        plan = plan_of(offload, devices=1)
        step = fsdp.make_train_step(plan, loss_fn, optax.sgd(0.1))
        state = fsdp.abstract_state(plan, optax.sgd(0.1))
        text = str(step.jitted.trace(state, rows()).jaxpr)
        stack, unit = f"[{LAYERS},{EMBED},{MLP}]", f"[{EMBED},{MLP}]"
        copied = {shape: f"f32<host>{shape}" in text for shape in (stack, unit)}
        counts[offload] = copied[unit], copied[stack]
    assert counts == {WHOLE: (False, True), STREAM: (True, True)}


def test_a_plan_says_what_is_streamed():
    plan = plan_of(STREAM)
    names = [param.name for param in plan.param_plans if param.is_streamed]
    # Norms are smaller than `min_elements`; the head is in no unit.
    assert names == ["layers.down", "layers.up"]
    # float32, split over 8 devices.
    size = 2 * EMBED * MLP * 4 // 8
    said = f"streamed from the host: {LAYERS * size / 1024:.2f} KiB of 2 parameters"
    assert said in repr(plan) and f"{size} B in the largest" in repr(plan)
    assert "streamed" not in repr(plan_of(WHOLE))


def test_what_cannot_be_streamed_is_refused_with_all_reasons():
    with pytest.raises(ValueError, match=facts("stream_params=True", "params=True")):
        fsdp.OffloadPolicy(stream_params=True)
    gather = fsdp.MixedPrecisionPolicy(
        param_gather=fsdp.sharding.Float8Gather(min_elements=100)
    )
    wrong = {
        "prefetch": ({"prefetch": 0}, ("prefetch=0",)),
        "reshard": (
            {"reshard_after_forward": False, "mp_policy": gather},
            ("reshard_after_forward=False", "param_gather", "layers.up"),
        ),
        "ZeRO-2": ({"zero_dp_strategy": 2}, ("zero_dp_strategy=3", "layers.up")),
        "no stack": ({"units": ()}, ("(root)", "fsdp.Stacked(...)")),
    }
    for config, said in wrong.values():
        with pytest.raises(ValueError, match=facts("stream_params=True", *said)):
            plan_of(STREAM, **config)
    for axis in ("tp", "pp"):
        mesh = fsdp.make_mesh(**{axis: 2})
        split = {"tensor_parallel": {"layers.up": 1}} if axis == "tp" else {}
        config = fsdp.FSDPConfig(offload=STREAM, **split)
        with pytest.raises(ValueError, match=facts("stream_params=True", f"{axis}=2")):
            fsdp.fully_shard(make_weights, mesh, [fsdp.Stacked("layers")], config)


@pytest.mark.parametrize(
    "loss, said",
    [(gathered_when_it_begins, "prefetch=0"), (unrolled_by_hand, "stream_params=True")],
)
def test_layers_that_are_not_gathered_ahead_are_refused(loss, said):
    plan = plan_of(STREAM)
    params = fsdp.init_params(plan, jax.random.key(0))
    compute = fsdp.value_and_grad(plan, loss)
    with pytest.raises(ValueError, match=facts(said, "layers.up")):
        compute(params, rows())
