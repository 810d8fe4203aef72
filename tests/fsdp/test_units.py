"""A unit's weights are unsharded inside it, nowhere else, and nobody has to notice."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers.compare import worst
from helpers.errors import facts
from helpers.hlo import collectives
from jax import lax

import fsdp_jax as fsdp

pytestmark = pytest.mark.versions

# Gradients of eight devices and of one, in float32, differ by the order of summation.
RTOL = 1e-5
WIDTH = 8
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
MESH = fsdp.make_mesh()


def matrices(*lead):
    def make(key):
        inside, outside = jax.random.split(key)
        return {
            "layers": jax.random.normal(inside, (*lead, WIDTH, WIDTH)) * 0.3,
            "scale": jax.random.normal(outside, (WIDTH,)),
        }

    return make


def layer(w, x):
    return jnp.tanh(x @ w)


def scanned(w, x):
    return layer(w, x), None


def grads_of(make, units, loss, **config):
    """(gradients on eight devices, gradients by jax alone)."""
    plan = fsdp.fully_shard(make, MESH, units, fsdp.FSDPConfig(**config))
    params = fsdp.init_params(plan, jax.random.key(0))
    _, grads = fsdp.value_and_grad(plan, loss)(params, X)

    def unsharded(params):
        return loss(plan.model.merge(params, plan.model.state), X)

    return grads, jax.jit(jax.grad(unsharded))(fsdp.unshard(params))


def loss_of_plan(make, units, loss, **config):
    """The loss on eight devices, for errors that a trace alone should raise."""
    plan = fsdp.fully_shard(make, MESH, units, fsdp.FSDPConfig(**config))
    fn = fsdp.make_train_step(plan, loss, optax.sgd(0.1))
    return fn.lower(fsdp.abstract_state(plan, optax.sgd(0.1)), X)


@pytest.mark.parametrize(
    "use",
    [
        lambda w, x: x @ w,
        lambda w, x: w @ x.T,
        lambda w, x: w.T,
        lambda w, x: w.shape[0] * x,
        lambda w, x: w[0],
        lambda w, x: jnp.sum(w),
        lambda w, x: jnp.einsum("rd,de->re", x, w),
    ],
    ids=["x @ w", "w @ x", "w.T", "w.shape", "w[0]", "sum", "einsum"],
)
def test_a_weight_used_outside_its_unit_is_an_error_that_explains(use):
    says = ["'layers'", "fsdp.unit", "`units`"]
    with pytest.raises(ValueError, match=facts(*says)):
        loss_of_plan(matrices(), ["layers"], lambda p, x: jnp.mean(use(p["layers"], x)))


def test_a_linen_module_that_transforms_weights_of_a_unit_is_told_so():
    class Normed(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.WeightNorm(linen.Dense(8, name="dense"), name="normed")(x)

    def make(key):
        return Normed().init(key, X)

    def loss(variables, x):
        return jnp.mean(Normed().apply(variables, x) ** 2)

    with pytest.raises(
        ValueError, match=facts("WeightNorm", "dense/kernel", "/normed")
    ):
        loss_of_plan(make, ["params.dense"], loss)
    loss_of_plan(make, [], loss)


def test_an_nnx_weight_used_outside_its_unit_is_an_error_that_explains():
    def loss(model, x):
        return jnp.mean(x @ model.inner.kernel[...])

    with pytest.raises(
        ValueError, match=facts("'inner.kernel'", "'inner'", "fsdp.unit")
    ):
        loss_of_plan(lambda key: Outer(nnx.Rngs(key)), [nnx.Linear], loss)


class Outer(nnx.Module):
    """A weight of its own, and a unit inside that is called twice."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.w = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)))

    def __call__(self, x):
        return jnp.tanh(self.inner(jnp.tanh(self.inner(x @ self.w))) @ self.w)


class Nested(nnx.Module):
    def __init__(self, rngs):
        self.outer = Outer(rngs)

    def __call__(self, x):
        return self.outer(x)


class EquinoxInner(eqx.Module):
    w: jax.Array

    def __init__(self, key):
        self.w = jax.random.normal(key, (WIDTH, WIDTH))

    def __call__(self, x):
        return x @ self.w


class EquinoxOuter(eqx.Module):
    inner: EquinoxInner
    w: jax.Array

    def __init__(self, key):
        inner, own = jax.random.split(key)
        self.inner = EquinoxInner(inner)
        self.w = jax.random.normal(own, (WIDTH, WIDTH))

    def __call__(self, x):
        return jnp.tanh(self.inner(jnp.tanh(self.inner(x @ self.w))) @ self.w)


def nested_functions(params, x):
    inner = fsdp.unit(layer)

    def outer(w, x):
        return jnp.tanh(inner(w["inner"], inner(w["inner"], x @ w["w"])) @ w["w"])

    return jnp.mean(fsdp.unit(outer)(params["outer"], x) ** 2)


def nested_weights(key):
    one, two = jax.random.split(key)
    shape = (WIDTH, WIDTH)
    return {
        "outer": {
            "inner": jax.random.normal(one, shape),
            "w": jax.random.normal(two, shape),
        }
    }


NESTED = {
    "nnx": (
        lambda key: Nested(nnx.Rngs(key)),
        [Outer, nnx.Linear],
        lambda model, x: jnp.mean(model(x) ** 2),
    ),
    "equinox": (
        lambda key: {"outer": EquinoxOuter(key)},
        [EquinoxOuter, EquinoxInner],
        lambda model, x: jnp.mean(model["outer"](x) ** 2),
    ),
    "functions": (nested_weights, ["outer", "outer.inner"], nested_functions),
}


@pytest.mark.parametrize("name", NESTED)
def test_units_inside_units_compute_the_same(name):
    grads, want = grads_of(*NESTED[name])
    error = worst(grads, want)
    assert error < RTOL


# The outer's one weight, and what is inside once a call; an nnx.Linear has a bias too.
@pytest.mark.parametrize(
    "name, gathers", [("nnx", 1 + 2 * 2), ("equinox", 1 + 2), ("functions", 1 + 2)]
)
def test_units_inside_units_are_gathered_by_their_own_unit_only(name, gathers):
    options = {"reshard_after_forward": False, "prefetch": 0}
    text = loss_of_plan(*NESTED[name], **options).as_text()
    assert text.count('"stablehlo.all_gather"') == gathers
    assert text.count('"stablehlo.reduce_scatter"') == gathers


def test_a_unit_that_is_called_again_at_once_is_gathered_once():
    text = loss_of_plan(*NESTED["functions"], reshard_after_forward=False).as_text()
    assert text.count('"stablehlo.all_gather"') == 1 + 1


def test_a_unit_called_twice_is_gathered_twice_and_its_gradients_add_up():
    def loss(params, x):
        f = fsdp.unit(layer)
        return jnp.mean(f(params["layers"], f(params["layers"], x)) ** 2)

    grads, want = grads_of(matrices(), ["layers"], loss)
    np.testing.assert_allclose(grads["layers"], want["layers"], rtol=RTOL, atol=1e-7)


def test_consts_xs_and_ys_of_a_scan_are_those_of_a_loop():
    biases = jnp.arange(3 * WIDTH, dtype=jnp.float32).reshape(3, WIDTH) / 10

    def unit(w, x, bias, scale):
        y = layer(w, x) * scale[None] + bias[None]
        return y, y.mean()

    def loss(params, x):
        y, means = fsdp.scan(unit, params["layers"], x, (biases,), (params["scale"],))
        assert means.shape == (3,)
        return jnp.mean(y**2) + means[0] * 2 + means[2]

    def loop(params, x):
        means = []
        for w, bias in zip(params["layers"], biases, strict=True):
            x, mean = unit(w, x, bias, params["scale"])
            means.append(mean)
        return jnp.mean(x**2) + means[0] * 2 + means[2]

    grads, _ = grads_of(matrices(3), [fsdp.Stacked("layers")], loss)
    want = jax.jit(jax.grad(loop))(matrices(3)(jax.random.key(0)), X)
    error = worst(grads, want)
    assert error < RTOL


def test_a_scan_that_closes_over_a_tracer_is_an_error_that_names_it():
    def loss(params, x):
        scale = params["scale"]
        y, _ = fsdp.scan(lambda w, x: (layer(w, x) * scale, None), params["layers"], x)
        return jnp.mean(y)

    with pytest.raises(ValueError, match=facts("fsdp.scan", "scale", "`consts`")):
        loss_of_plan(matrices(2), [fsdp.Stacked("layers")], loss)


@pytest.mark.parametrize("name", ["xs", "consts"])
def test_a_scan_over_no_tuple_is_an_error(name):
    says = [f"fsdp.scan({name}=...)", "list", f"{name}=({name},)"]
    with pytest.raises(ValueError, match=facts(*says)):
        fsdp.scan(scanned, jnp.ones((2, 8, 8)), X, **{name: [X]})


def test_a_stack_that_enters_its_unit_unsliced_is_an_error_that_explains():
    def loss(params, x):
        return jnp.mean(fsdp.unit(lambda w, x: x @ w[0])(params["layers"], x))

    says = ["'layers'", "(2, 8, 8)", "1", "3", "2", "fsdp.scan"]
    with pytest.raises(ValueError, match=facts(*says)):
        loss_of_plan(matrices(2), [fsdp.Stacked("layers")], loss)


def test_a_stack_that_was_planned_as_plain_is_an_error_that_explains():
    def loss(params, x):
        y, _ = fsdp.scan(scanned, params["layers"], x)
        return jnp.mean(y)

    says = ["'layers'", "0", "1", "units=[fsdp.Stacked(...)]"]
    with pytest.raises(ValueError, match=facts(*says)):
        loss_of_plan(matrices(2), ["layers"], loss)


def test_marked_functions_run_as_they_are_without_a_plan():
    params = matrices(2)(jax.random.key(0))
    got = fsdp.unit(layer)(params["layers"][0], X)
    np.testing.assert_array_equal(got, layer(params["layers"][0], X))
    assert fsdp.unit(layer).__name__ == "layer"
    got, _ = fsdp.scan(scanned, params["layers"], X)
    want = layer(params["layers"][1], layer(params["layers"][0], X))
    np.testing.assert_allclose(got, want, rtol=RTOL, atol=1e-6)


class Switch(nnx.Module):
    """Takes every sort of argument that is no array."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, power, *, activation, mode="none", mask=None, twice=False):
        y = activation(self.linear(x)) ** power
        assert isinstance(power, int) and isinstance(twice, bool)
        y = y if mask is None else y * mask
        return {"double": 2 * y, "none": y}[mode] + (y if twice else 0)


def test_keyword_and_static_arguments_reach_a_unit():
    def loss(model, x):
        kw = {"activation": jax.nn.gelu, "mode": "double", "mask": x, "twice": True}
        return jnp.mean(model(x, 3, **kw) ** 2)

    grads, want = grads_of(lambda key: Switch(nnx.Rngs(key)), [Switch], loss)
    error = worst(grads, want)
    assert error < RTOL


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)))
        self.block = Outer(rngs)
        self.head = self.embed

    def __call__(self, x):
        return self.block(x @ self.embed) @ self.head.T


def test_tied_weights_are_one_parameter_with_the_sum_of_both_gradients():
    def make(key):
        return Tied(nnx.Rngs(key))

    grads, want = grads_of(make, [Outer], lambda model, x: jnp.mean(model(x) ** 2))
    assert len(jax.tree.leaves(grads)) == 4  # embed, w, and a Linear's two
    error = worst(grads, want)
    assert error < RTOL


@pytest.fixture
def all_optimizations():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def test_the_remat_policy_decides_what_activations_are_kept(all_optimizations):
    def wide(w, x):
        for _ in range(4):
            x = jnp.sin(x)
        return jnp.tanh(x @ w), None

    def loss(params, x):
        x = jnp.tile(x, (64, 1))
        return jnp.mean(fsdp.scan(wide, params["layers"], x)[0] ** 2)

    def bytes_of(policy):
        lowered = loss_of_plan(
            matrices(8), [fsdp.Stacked("layers")], loss, remat_policy=policy
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    rows = 16 // 8 * 64
    one_activation = 8 * rows * WIDTH * 4  # of all eight layers, on one device
    everything = bytes_of(None)
    nothing = bytes_of(jax.checkpoint_policies.nothing_saveable)
    assert everything - nothing > 3 * one_activation


class DropBlock(nnx.Module):
    """`x + w` dropped out, so that its gradient by `w` is the mask itself."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.zeros((1, WIDTH)))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x + self.w[...])


class DropModel(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([DropBlock(rngs) for _ in range(2)])

    def __call__(self, x):
        return [layer(x) for layer in self.layers]


def drop_loss(model, batch):
    """The masks of both layers as aux; a loss whose gradient is their mean."""
    outs = jnp.stack(model(batch), 1)  # rows layers embed
    return jnp.mean(jnp.sum(outs, (1, 2))), outs


@pytest.fixture(scope="module")
def dropped():
    """(masks [step, rows, layers, embed], gradients of each step)."""
    plan = fsdp.fully_shard(lambda key: DropModel(nnx.Rngs(key)), MESH, [DropBlock])
    params = fsdp.init_params(plan, jax.random.key(0))
    keep = optax.GradientTransformation(
        lambda p: jax.tree.map(jnp.zeros_like, p),
        lambda g, state, params=None: (jax.tree.map(jnp.zeros_like, g), g),
    )
    state = fsdp.init_state(plan, keep, params, key=jax.random.key(7))
    step = fsdp.make_train_step(plan, drop_loss, keep, has_aux=True)
    restart = jax.tree.map(jnp.copy, state)
    masks, grads = [], []
    for given in (state, None, restart):
        state, metrics = step(state if given is None else given, np.ones_like(X))
        masks.append(np.asarray(metrics["aux"]) > 0)
        layers = state.opt_state["layers"]
        grads.append(np.stack([np.asarray(layers[i]["w"]) for i in range(2)]))
    return np.stack(masks), np.stack(grads)


def test_dropout_differs_between_ranks_rows_layers_and_steps(dropped):
    masks, _ = dropped
    first = masks[0]
    assert 0.3 < first.mean() < 0.7
    assert len({row.tobytes() for row in first}) == len(first)
    assert (first[:, 0] != first[:, 1]).any()
    assert (masks[0] != masks[1]).any()


def test_the_same_step_drops_the_same(dropped):
    masks, _ = dropped
    np.testing.assert_array_equal(masks[0], masks[2])


def test_the_backward_drops_what_the_forward_dropped(dropped):
    masks, grads = dropped
    scale = 1 / 0.5
    want = scale * masks.mean(1)[:, :, None]  # step layers 1 embed
    np.testing.assert_allclose(grads, want, rtol=1e-6)


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.0, rngs=rngs)

    def __call__(self, x):
        self.norm(x)
        return self.linear(x)


@pytest.mark.parametrize("units", [(), (Normed,)], ids=["root", "unit"])
def test_batch_norm_statistics_are_averaged_over_ranks(units):
    config = fsdp.FSDPConfig(sync_batch_norm=False)
    plan = fsdp.fully_shard(lambda key: Normed(nnx.Rngs(key)), MESH, units, config)
    tx = optax.sgd(0.1)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    step = fsdp.make_train_step(plan, lambda model, x: jnp.mean(model(x) ** 2), tx)
    state, _ = step(state, X)
    by_rank = X.reshape(8, 2, WIDTH)
    stats = state.model_state["norm"]
    np.testing.assert_allclose(
        stats["mean"][...], by_rank.mean(1).mean(0), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        stats["var"][...], by_rank.var(1).mean(0), rtol=1e-4, atol=1e-6
    )
    for leaf in jax.tree.leaves(state.model_state):
        pieces = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all(np.array_equal(piece, pieces[0]) for piece in pieces)


def test_a_unit_under_the_users_own_checkpoint_and_vmap_is_the_same():
    def loss(params, x):
        def one(x):
            return jax.checkpoint(fsdp.unit(layer))(params["layers"], x)

        return jnp.mean(jax.vmap(one)(x) ** 2)

    grads, want = grads_of(matrices(), ["layers"], loss)
    np.testing.assert_allclose(grads["layers"], want["layers"], rtol=RTOL, atol=1e-7)


def test_a_mapped_unit_reduces_one_gradient_and_not_one_a_row():
    def loss(params, x):
        f = fsdp.unit(layer)
        return jnp.mean(jax.vmap(lambda x: f(params["layers"], x))(x) ** 2)

    found = collectives(loss_of_plan(matrices(), ["layers"], loss).compile().as_text())
    scatters = [c.size for c in found if c.op == "reduce-scatter"]
    assert scatters == [WIDTH]  # one row of the matrix; the scale is not used


def test_a_condition_around_a_unit_is_the_same():
    def loss(params, x):
        f = fsdp.unit(layer)
        y = lax.cond(True, lambda x: f(params["layers"], x), lambda x: x, x)
        return jnp.mean(y**2)

    grads, want = grads_of(matrices(), ["layers"], loss)
    np.testing.assert_allclose(grads["layers"], want["layers"], rtol=RTOL, atol=1e-7)


class OneLayer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)


@pytest.mark.parametrize(
    "units, says",
    [
        ("linear", ["units=['linear']"]),
        (OneLayer, ["units=[OneLayer]"]),
        (OneLayer.__init__, ["units=[OneLayer.__init__]"]),
        (fsdp.Stacked("linear"), ["units=[Stacked("]),
        (None, ["units=None"]),
        ([None], ["None"]),
        ([dict], ["dict"]),
    ],
)
def test_what_is_no_list_of_units_is_refused_with_what_to_write(units, says):
    with pytest.raises(ValueError, match=facts(*says)):
        fsdp.fully_shard(lambda key: OneLayer(nnx.Rngs(key)), MESH, units)


def test_a_unit_may_return_nothing():
    def make(key):
        return {"block": jax.random.normal(key, (8, 8)), "head": jnp.ones((8, 1))}

    def loss(params, x):
        seen = []

        def check(w, x):
            seen.append(x.shape)

        fsdp.unit(check)(params["block"], x)
        assert seen
        return jnp.mean((x @ params["head"]) ** 2)

    plan = fsdp.fully_shard(make, fsdp.make_mesh(), ["block"])
    params = fsdp.init_params(plan, jax.random.key(0))
    found, grads = fsdp.value_and_grad(plan, loss)(params, jnp.ones((8, 8)))
    assert float(found[0]) == 64.0
    assert not np.any(fsdp.unshard(grads)["block"])
