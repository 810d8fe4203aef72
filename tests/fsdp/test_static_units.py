"""Units of a stack that differ in what is known when they are traced."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import host, worst
from helpers.errors import facts
from helpers.hlo import collectives

import fsdp_jax as fsdp
from fsdp_jax.step._split_unit import split_variants
from fsdp_jax.step._static_runs import runs_in_chunk

pytestmark = pytest.mark.versions

LAYERS, WIDTH = 5, 16
KINDS = ("tanh", "sin", "sin", "sin", "tanh")
ACTIVATIONS = {"tanh": jnp.tanh, "sin": jnp.sin}
POLICIES = jax.checkpoint_policies


def make_weights(key):
    up, down = jax.random.split(key)
    return {
        "layers": {
            "up": 0.5 * jax.random.normal(up, (LAYERS, WIDTH, WIDTH)),
            "down": 0.5 * jax.random.normal(down, (LAYERS, WIDTH, WIDTH)),
        }
    }


def layer(w, x, shift, gain, *, static):
    # A weight that is derived before it is read, in each variant anew.
    up = (2 * w["up"]).T
    hidden = ACTIVATIONS[static](x @ up + shift)
    hidden = hidden if static == "sin" else hidden @ w["down"]
    return x + hidden * gain, (hidden**2).mean()


def chosen_by_hand(w, x, shift, gain, is_sin):
    """What `layer` computes, chosen as it runs."""
    (one, y), (other, z) = (layer(w, x, shift, gain, static=k) for k in ("sin", "tanh"))
    return jnp.where(is_sin, one, other), jnp.where(is_sin, y, z)


def loss_of(*, static=KINDS, **options):
    def loss(weights, batch):
        gain = 0.5 * jnp.ones((1, WIDTH))
        shifts = jnp.linspace(0.0, 1.0, LAYERS)[:, None, None] * jnp.ones((1, 1, WIDTH))
        unit, xs, more = layer, (shifts,), {"static": static}
        if static is None:
            is_sin = jnp.asarray([kind == "sin" for kind in KINDS])
            unit, xs, more = _unit_by_hand, (shifts, is_sin), {}
        given = (weights["layers"], batch["x"], xs, (gain,))
        x, ys = fsdp.scan(unit, *given, **options, **more)
        return jnp.mean((x - batch["y"]) ** 2) + (ys * jnp.arange(LAYERS)).mean()

    return loss


def _unit_by_hand(w, x, shift, is_sin, gain):
    return chosen_by_hand(w, x, shift, gain, is_sin)


def rows():
    random = np.random.default_rng(0)
    return {k: random.normal(size=(8, WIDTH)).astype(np.float32) for k in "xy"}


def plan_of(mesh=None, devices=4, **config):
    mesh = fsdp.make_mesh(**(mesh or {}), devices=jax.devices()[:devices])
    units = [fsdp.Stacked("layers")]
    return fsdp.fully_shard(make_weights, mesh, units, fsdp.FSDPConfig(**config))


def computed(plan, loss, num_microbatches=1):
    params = fsdp.init_params(plan, jax.random.key(0))
    compute = fsdp.value_and_grad(plan, loss, num_microbatches=num_microbatches)
    (value, _), grads = compute(params, rows())
    return float(value), host(grads)


@functools.cache
def by_hand():
    return computed(plan_of(), loss_of(static=None, prefetch=0))


def assert_near(found, want):
    assert found[0] == pytest.approx(want[0], rel=1e-6)
    # Float32, and in another order.
    assert worst(found[1], want[1]) < 1e-5


@pytest.mark.parametrize(
    "options, config",
    [
        ({"prefetch": 0}, {}),
        ({"prefetch": 1}, {}),
        ({"prefetch": 2}, {}),
        ({"prefetch": 1, "unroll": 2}, {}),
        ({}, {}),
        ({}, {"reshard_after_forward": False}),
        ({"prefetch": 1}, {"remat_policy": POLICIES.nothing_saveable}),
        ({"prefetch": 0}, {"remat_policy": POLICIES.dots_saveable}),
    ],
    ids=["0", "1", "2", "unrolled", "default", "kept", "nothing saved", "dots saved"],
)
def test_each_unit_computes_what_its_value_says(options, config):
    assert_near(computed(plan_of(**config), loss_of(**options)), by_hand())


def test_another_value_computes_something_else():
    other = ("sin", *KINDS[1:])
    found = computed(plan_of(), loss_of(static=other))
    assert abs(found[0] / by_hand()[0] - 1) > 1e-4


@pytest.mark.parametrize("virtual", [1, 2])
def test_pipeline_stages_choose_as_they_run(virtual):
    """Five units on two stages, in chunks of three or two, the last of them padding."""
    config = fsdp.PipelineConfig(virtual_stages=virtual)
    plan = plan_of({"pp": 2}, pipeline=config)
    assert_near(computed(plan, loss_of(), num_microbatches=2), by_hand())


def test_only_where_stages_differ_a_unit_chooses():
    def runs(static, size):
        return [(r.value, r.stop - r.start) for r in runs_in_chunk(static, size)]

    # First and last ones of two chunks of four, and of one chunk of all.
    assert runs("abbbbbba", 4) == [(("a", "b"), 1), (("b",), 2), (("a", "b"), 1)]
    assert runs("abbbbbba", 8) == [(("a",), 1), (("b",), 6), (("a",), 1)]
    # Seven units, one of padding: the last one stands at another place.
    assert runs("abbbbba", 4) == [
        (("a", "b"), 1),
        (("b",), 1),
        (("a", "b"), 1),
        (("b",), 1),
    ]


def test_what_variants_make_of_the_same_weights_is_made_and_kept_once():
    shapes = jax.eval_shape(make_weights, jax.random.key(0))["layers"]
    first = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), shapes)
    args = [jax.ShapeDtypeStruct((n, WIDTH), jnp.float32) for n in (8, 1, 1)]

    def values(*kinds):
        computes = [functools.partial(layer, static=kind) for kind in kinds]
        weights_only, rests, _ = split_variants(computes, lambda w: w, first, args)
        assert len(rests) == len(kinds)
        return len(jax.eval_shape(weights_only, first))

    assert [values("sin"), values("tanh"), values("sin", "tanh")] == [1, 2, 2]


def square(w, x, *, static):
    return ACTIVATIONS[static](x @ w), None


def test_gathers_go_on_from_one_loop_to_the_next():
    kinds = ("tanh", "tanh", "sin", "sin", "tanh", "tanh")

    def loss(weights, batch):
        x, _ = fsdp.scan(square, weights["layers"], batch, prefetch=1, static=kinds)
        return jnp.mean(x**2)

    plan = fsdp.fully_shard(
        lambda key: {"layers": jax.random.normal(key, (len(kinds), 64, 64))},
        fsdp.make_mesh(devices=jax.devices()[:2]),
        [fsdp.Stacked("layers")],
    )
    tx = optax.sgd(0.1)
    step = fsdp.make_train_step(plan, loss, tx)
    batch = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    text = step.lower(fsdp.abstract_state(plan, tx), batch).compile().as_text()
    found = [(c.op, c.depth) for c in collectives(text or "")]
    # Before the first loop one gather, and in each of three loops, forward and
    # backward, one; were they apart, each would begin with a gather that it waits for.
    assert [found.count(("all-gather", depth)) for depth in (0, 1)] == [1, 6]
    assert [found.count(("reduce-scatter", depth)) for depth in (0, 1)] == [1, 3]


def test_values_of_another_number_than_the_units_are_refused():
    for mesh in ({}, {"pp": 2}):
        with pytest.raises(ValueError, match=facts("static", "3", "5")):
            computed(plan_of(mesh), loss_of(static=KINDS[:3]))
