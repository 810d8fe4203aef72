"""float16 with a loss scale, bfloat16 weights rounded at random, moments in 8 bits."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.errors import facts

import fsdp_jax as fsdp
from bridge.models import Decoder, DecoderConfig, DecoderLayer
from fsdp_jax.cli._decoder_loss import next_token_loss
from fsdp_jax.optim._eight_bit import dynamic_values
from fsdp_jax.optim._stochastic_rounding import stochastic_round

BF16, FP16, FP32 = jnp.bfloat16, jnp.float16, jnp.float32
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SHORT = 24


def some(devices):
    return fsdp.make_mesh(devices=jax.devices()[:devices])


# The demo's text, and a Llama as small as its


def text_batches(steps, rows=8, seq=32):
    """Rows of the bytes of what the demo trains on."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = np.frombuffer((library / "argparse.py").read_bytes(), np.uint8)
    random = np.random.default_rng(0)
    starts = random.integers(0, text.size - seq - 1, (steps, rows))
    for first in starts:
        yield np.stack([text[i : i + seq + 1] for i in first]).astype(np.int32)


def attention(query, key, value, *, scale, **_):
    """Causal; jax's own asks of the CPU what it has not for float16."""
    key, value = (
        jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(FP32) * scale
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def llama_plan(mesh=None, **policy):
    config = DecoderConfig(
        model_type="llama",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    return fsdp.fully_shard(
        lambda key: Decoder(
            config, rngs=nnx.Rngs(key), scan=fsdp.scan, attention=attention
        ),
        mesh or fsdp.make_mesh(),
        [DecoderLayer],
        fsdp.FSDPConfig(mp_policy=fsdp.MixedPrecisionPolicy(**policy)),
    )


def trained(plan, tx, steps, loss_scale=None, start=0):
    """(state, loss of each step)."""
    step = fsdp.make_train_step(plan, next_token_loss, tx, loss_scale=loss_scale)
    params = fsdp.init_params(plan, jax.random.key(start))
    state = fsdp.init_state(plan, tx, params, loss_scale=loss_scale)
    losses = []
    for tokens in text_batches(steps):
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
    return state, losses


VARIANTS = {
    "float16": lambda tx: trained_with(tx, FP16, fsdp.training.LossScale(2.0**15)),
    "stochastic": lambda tx: trained_with(tx, main_params_dtype=BF16, stochastic=True),
    "8 bits": lambda tx: trained_with(fsdp.optim.eight_bit(tx, min_elements=1024)),
    "narrow floats": lambda tx: trained_with(
        fsdp.optim.precision_aware(tx, {"mu": E4M3, "nu": FP16})
    ),
}


def trained_with(tx, param_dtype=None, loss_scale=None, *, stochastic=False, **policy):
    def run(steps, start):
        plan = llama_plan(
            param_dtype=param_dtype, stochastic_rounding=stochastic, **policy
        )
        return trained(plan, tx, steps, loss_scale, start)

    return run


@functools.cache
def losses_of(name, steps, starts):
    """Of each step, the mean over some starts."""
    tx = optax.adamw(3e-3)
    run = trained_with(tx) if name == "float32" else VARIANTS[name](tx)
    return np.mean([run(steps, start)[1] for start in range(starts)], axis=0)


def assert_converges(name, steps, tail, starts=1):
    want, got = losses_of("float32", steps, starts), losses_of(name, steps, starts)
    assert want[0] - np.mean(want[-tail:]) > 1  # it learns
    assert (got != want).any()
    assert abs(np.mean(got[-tail:]) / np.mean(want[-tail:]) - 1) < 0.02


@pytest.mark.parametrize("name", list(VARIANTS))
def test_it_learns_the_demos_text_as_float32_does(name):
    assert_converges(name, SHORT, tail=4)


@pytest.mark.long
@pytest.mark.parametrize("name", list(VARIANTS))
def test_it_still_does_after_many_steps(name):
    # By now two starts in float32 that differ by 1e-4 are 1 to 2 % apart themselves.
    assert_converges(name, 400, tail=40, starts=3)


# The scale of the loss


def toy(dtype=FP16):
    """A model whose gradient is `batch`: too small for float16, or too large."""
    plan = fsdp.fully_shard(
        lambda key: {"w": jnp.ones((8, 8))},
        fsdp.make_mesh(),
        config=fsdp.FSDPConfig(mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=dtype)),
    )

    def loss(params, batch):
        by_row = (params["w"] * batch["g"][0].astype(dtype)).sum()
        return by_row.astype(FP32) * batch["f"][0]

    return plan, loss


def rows(g, factor=1.0):
    return {"g": np.full(8, g, np.float32), "f": np.full(8, factor, np.float32)}


def stepper(scale, tx=None, **options):
    plan, loss = toy()
    tx = tx or optax.sgd(1.0)
    step = fsdp.make_train_step(plan, loss, tx, loss_scale=scale, **options)
    params = fsdp.init_params(plan, jax.random.key(0))
    return step, fsdp.init_state(plan, tx, params, loss_scale=scale)


SMALL = rows(2.0**-14, 2.0**-12)  # the product is below float16's least, 2**-24


def test_gradients_too_small_for_float16_arrive_in_their_own_size():
    for scale, moved in ((None, 0.0), (fsdp.training.LossScale(2.0**12), 2.0**-26)):
        plan, loss = toy()
        step = fsdp.make_train_step(plan, loss, optax.sgd(2.0**20), loss_scale=scale)
        params = fsdp.init_params(plan, jax.random.key(0))
        state = fsdp.init_state(plan, optax.sgd(1.0), params, loss_scale=scale)
        state, metrics = step(state, SMALL)
        np.testing.assert_array_equal(
            np.asarray(state.params["w"]), np.full((8, 8), 1 - moved * 2.0**20)
        )
        assert float(metrics["grad_norm"]) == pytest.approx(8 * moved)


def test_the_scale_is_divided_out_before_gradients_are_clipped():
    clip = optax.chain(optax.clip_by_global_norm(4.0), optax.sgd(1.0))
    step, state = stepper(fsdp.training.LossScale(2.0**10), clip)
    state, _ = step(state, rows(0.25))  # of norm 2: not clipped
    np.testing.assert_array_equal(np.asarray(state.params["w"]), np.full((8, 8), 0.75))


def follow(scale, finite):
    """The scales after each of the steps, as the state alone tells them."""
    state, scales = scale.start(), []
    update = jax.jit(scale.update)
    for ok in finite:
        state = update(state, jnp.array(ok))
        scales.append(float(state.scale))
    return scales


def test_it_grows_after_an_interval_and_backs_off_at_once_as_torchs():
    import itertools

    scale = fsdp.training.LossScale(8.0, growth_interval=3)
    finite = [True, True, True, True, False, True, True, True, False, False]
    assert follow(scale, finite) == [8, 8, 16, 16, 8, 8, 8, 16, 8, 4]
    least = follow(
        fsdp.training.LossScale(2.0, min_scale=1.0), itertools.repeat(False, 4)
    )
    assert least == [1, 1, 1, 1]
    most = follow(fsdp.training.LossScale(2.0**127, growth_interval=1), [True, True])
    assert most == [2.0**127, 2.0**127]  # float32 ends there


def test_hysteresis_lets_failures_pass_until_it_grows_as_megatrons():
    scale = fsdp.training.LossScale(8.0, growth_interval=2, hysteresis=2)
    finite = [False, True, False, False, True, True, False, False]
    #        one left  |  shrinks, and again, being at none; grows: two left anew
    assert follow(scale, finite) == [8, 8, 4, 2, 2, 4, 4, 2]


def test_steps_that_overflow_are_passed_over_and_counted_and_the_scale_is_saved(
    tmp_path,
):
    scale = fsdp.training.LossScale(2.0**10, growth_interval=2)
    step, state = stepper(scale)
    seen = []
    for g in (0.5, 2.0**12, 2.0**6, 0.5, 0.5):
        before = np.asarray(state.params["w"])
        state, metrics = step(state, rows(g))
        moved = bool((np.asarray(state.params["w"]) != before).any())
        seen.append((float(metrics["loss_scale"]), moved))
    # 2**12 x 2**10 is no float16. After two good ones it grows again.
    assert seen == [(1024, True), (1024, False), (512, True), (512, True), (1024, True)]
    assert int(state.num_skipped) == 1 and int(state.step) == 5
    fsdp.save(tmp_path, state)
    plan, loss = toy()
    like = fsdp.abstract_state(plan, optax.sgd(1.0), scale)
    loaded = fsdp.load(tmp_path, like)
    assert float(loaded.loss_scale.scale) == float(state.loss_scale.scale)
    assert int(loaded.loss_scale.good_steps) == 1
    step(loaded, rows(0.5))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"growth_factor": 0.5}, ["growth_factor=0.5", "1"]),
        ({"backoff_factor": 1.0}, ["backoff_factor=1.0", "0"]),
        ({"growth_interval": 0}, ["growth_interval=0", "1"]),
        ({"hysteresis": 0}, ["hysteresis=0", "1"]),
        ({"initial_scale": 0.5}, ["initial_scale=0.5", "min_scale"]),
        ({"min_scale": 0.0}, ["min_scale=0.0", "0"]),
    ],
)
def test_a_scale_out_of_range_is_refused(options, said):
    with pytest.raises(ValueError, match=facts(*said)):
        fsdp.training.LossScale(**options)


def test_a_scale_and_a_check_for_nan_contradict_each_other():
    with pytest.raises(
        ValueError, match=facts("on_nonfinite='raise'", "loss_scale=...")
    ):
        stepper(fsdp.training.LossScale(), on_nonfinite="raise")


# Rounding at random


def test_rounding_is_to_a_neighbour_and_right_on_the_mean():
    x = jnp.full(2**16, 1 + 2.0**-7 * 0.3, FP32)  # bfloat16 has 1 and 1 + 2**-7
    got = np.asarray(stochastic_round(x, jax.random.key(0)).astype(FP32))
    assert set(np.unique(got)) == {1.0, 1 + 2.0**-7}
    assert abs((got > 1).mean() - 0.3) < 0.01
    down = np.asarray(stochastic_round(-x, jax.random.key(0)).astype(FP32))
    np.testing.assert_array_equal(down, -got)


def test_what_bfloat16_holds_stays_and_so_does_what_is_not_finite():
    x = jnp.array([0.0, -0.0, 1.5, -(2.0**-130), jnp.inf, -jnp.inf, jnp.nan], FP32)
    got = np.asarray(stochastic_round(x, jax.random.key(3)).astype(FP32))
    np.testing.assert_array_equal(got, x)


def lone_weight(devices, **policy):
    return fsdp.fully_shard(
        lambda key: {"w": jnp.ones((8, 16)), "v": jnp.ones((13,))},
        some(devices),
        config=fsdp.FSDPConfig(
            mp_policy=fsdp.MixedPrecisionPolicy(main_params_dtype=BF16, **policy)
        ),
    )


def after_steps(plan, steps=64):
    def loss(params, batch):
        w = params["w"].astype(FP32).sum() + params["v"].astype(FP32).sum()
        return -w * batch["x"].mean()

    tx = optax.sgd(2.0**-11)  # a sixteenth of what bfloat16 has next to 1
    step = fsdp.make_train_step(plan, loss, tx)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    for _ in range(steps):
        state, _ = step(state, {"x": np.ones(8, np.float32)})
    params = fsdp.sharding.unpack(state.params)
    return {name: np.asarray(leaf.astype(FP32)) for name, leaf in params.items()}


def test_updates_too_small_for_bfloat16_arrive_on_the_mean_and_alike_on_any_mesh():
    lost = after_steps(lone_weight(8))
    assert (lost["w"] == 1).all()
    whole, split = (
        after_steps(lone_weight(n, stochastic_rounding=True)) for n in (1, 8)
    )
    for name in whole:
        np.testing.assert_array_equal(whole[name], split[name])
    assert abs(split["w"].mean() - (1 + 64 * 2.0**-11)) < 0.004
    assert len(np.unique(split["w"])) > 3  # each element for itself


def test_with_random_rounding_moments_are_in_float32():
    plan = lone_weight(8, stochastic_rounding=True)
    state = fsdp.abstract_state(plan, optax.adam(1e-3))
    assert state.params["w"].dtype == BF16
    assert all(leaf.dtype == FP32 for leaf in jax.tree.leaves(state.opt_state[0].mu))


def test_random_rounding_of_wide_weights_is_refused():
    with pytest.raises(
        ValueError, match=facts("stochastic_rounding=True", "main_params_dtype=None")
    ):
        fsdp.MixedPrecisionPolicy(stochastic_rounding=True)


# Moments in 8 bits


def test_the_values_of_a_code_are_256_in_order_and_reach_over_seven_decades():
    signed = dynamic_values(is_unsigned=False)
    above = dynamic_values(is_unsigned=True)
    for values, least in ((signed, -0.9930), (above, 0.0)):
        assert values.shape == (256,) and (np.diff(values) > 0).all()
        assert values[0] == pytest.approx(least, abs=1e-4) and values[-1] == 1
        assert values[values > 0].min() < 1e-6
    assert (signed > 0).sum() == 128 and (above > 0).sum() == 255


def small_params(rows=64, columns=512):
    return {"w": jnp.ones((rows, columns)), "b": jnp.ones(columns)}


def test_what_is_held_is_within_half_a_step_of_what_it_was():
    tx = fsdp.optim.eight_bit(optax.scale_by_adam(), min_elements=1024, block=128)
    params = small_params()
    random = np.random.default_rng(0)
    grads = {name: random.normal(size=x.shape) for name, x in params.items()}
    grads = jax.tree.map(lambda g: jnp.asarray(g, FP32), grads)
    exact = optax.scale_by_adam()
    _, state = tx.update(grads, tx.init(params))
    _, want = exact.update(grads, exact.init(params))
    assert state.codes.mu["w"].dtype == jnp.uint8
    assert state.codes.mu["w"].shape == (64, 512)
    assert state.scales.mu["w"].shape == (64, 4)
    assert state.codes.mu["b"] is None  # too small
    np.testing.assert_array_equal(state.rest.mu["b"], want.mu["b"])
    for field, is_unsigned in (("mu", False), ("nu", True)):
        values = dynamic_values(is_unsigned=is_unsigned)
        codes = np.asarray(getattr(state.codes, field)["w"])
        scales = np.asarray(getattr(state.scales, field)["w"])
        held = values[codes].reshape(64, 4, 128) * scales[..., None]
        exactly = np.asarray(getattr(want, field)["w"]).reshape(64, 4, 128)
        unit = exactly / scales[..., None]
        nearest = np.abs(unit[..., None] - values).min(-1) * scales[..., None]
        np.testing.assert_allclose(np.abs(held - exactly), nearest, rtol=0, atol=1e-6)


def test_codes_lie_as_their_parameters_and_take_a_quarter_and_are_saved(tmp_path):
    plan = llama_plan()
    tx = fsdp.optim.eight_bit(optax.adamw(1e-3), min_elements=1)
    like = fsdp.abstract_state(plan, tx)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))

    def bytes_of(tree):
        shards = [x.addressable_shards[0].data for x in jax.tree.leaves(tree)]
        return sum(shard.nbytes for shard in shards)

    params = bytes_of(state.params)
    assert 2 * params / 4 < bytes_of(state.opt_state) < 2.3 * params / 4
    codes = jax.tree.leaves(like.opt_state.codes[0].mu)
    for param, leaf in zip(plan.param_plans, codes, strict=True):
        assert leaf.sharding.spec == param.spec_with_tp(param.placements.optimizer)
    fsdp.save(tmp_path, state)
    half = llama_plan(some(4))
    loaded = fsdp.load(tmp_path, fsdp.abstract_state(half, tx))
    pair = (fsdp.sharding.unpack(each.opt_state) for each in (loaded, state))
    for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_optimizer_without_such_state_is_refused():
    with pytest.raises(ValueError, match=facts("eight_bit", "min_elements=4096")):
        fsdp.optim.eight_bit(optax.sgd(1.0)).init(small_params())
    with pytest.raises(ValueError, match=facts("block=0", "1")):
        fsdp.optim.eight_bit(optax.adam(1e-3), block=0)


def test_no_second_moment_becomes_zero_in_8_bits():
    tx = fsdp.optim.eight_bit(optax.scale_by_adam(), min_elements=1)
    params = {"w": jnp.ones(256)}
    grads = {"w": jnp.asarray(np.r_[1.0, np.full(254, 1e-6), 0.0], FP32)}
    _, state = tx.update(grads, tx.init(params))
    codes = np.asarray(state.codes.nu["w"])
    np.testing.assert_array_equal(codes > 0, np.asarray(grads["w"]) > 0)


def test_fields_of_the_state_are_told_from_parameters_of_their_names():
    """Of a parameter `nu` the first moment is signed, and a scalar stays as it is."""
    params = {"nu": jnp.ones((8, 8)), "ema": jnp.ones((8, 8)), "s": jnp.ones(())}
    grads = jax.tree.map(jnp.negative, params)
    exact = optax.chain(optax.scale_by_adam(), fsdp.optim.ema_of_params(0.5))
    _, want = exact.update(grads, exact.init(params), params)
    for tx in (
        fsdp.optim.eight_bit(exact, min_elements=1),
        fsdp.optim.precision_aware(exact, {"mu": FP16, "nu": FP16}),
    ):
        _, state = tx.update(grads, tx.init(params), params)
        for name in ("nu", "ema"):
            assert state.codes[0].mu[name] is not None
            assert state.codes[1].ema[name] is None
        assert state.codes[0].mu["s"] is None
        updates, _ = tx.update(grads, state, params)
        right, _ = exact.update(grads, want, params)
        for a, b in zip(*map(jax.tree.leaves, (updates, right)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-2)  # Half a step of 8 bits.


# Moments in narrow floats


@pytest.mark.parametrize("moments", ["mu", "nu", "mu nu"])
@pytest.mark.parametrize("dtype", [FP16, BF16, E4M3, E5M2])
def test_updates_by_narrow_moments_are_adams(dtype, moments):
    tx = fsdp.optim.precision_aware(
        optax.scale_by_adam(), dict.fromkeys(moments.split(), dtype)
    )
    exact, params = optax.scale_by_adam(), {"w": jnp.ones((4, 8))}
    state, want_state = tx.init(params), exact.init(params)
    random = np.random.default_rng(0)
    for _ in range(5):
        grads = {"w": jnp.asarray(random.uniform(0.5, 1, (4, 8)), FP32)}
        found, state = jax.jit(tx.update)(grads, state, params)
        want, want_state = exact.update(grads, want_state, params)
        # Each of two moments is off by half a step at each of the steps before.
        rtol = 2 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(found["w"], want["w"], rtol=rtol)


@pytest.mark.parametrize("dtype", [FP16, BF16, E4M3, E5M2])
def test_a_narrow_moment_is_the_nearest_float_and_no_second_moment_becomes_zero(dtype):
    tx = fsdp.optim.precision_aware(
        optax.scale_by_adam(), {"mu": dtype, "nu": dtype}, block=128
    )
    random = np.random.default_rng(0)
    # Magnitudes over many decades, so that narrow floats underflow.
    grads = random.normal(size=(64, 512)) * 10.0 ** random.uniform(-9, 0, (64, 512))
    params, grads = {"w": jnp.ones((64, 512))}, {"w": jnp.asarray(grads, FP32)}
    _, state = tx.update(grads, tx.init(params))
    exact = optax.scale_by_adam()
    _, want = exact.update(grads, exact.init(params))
    info = jnp.finfo(dtype)
    largest = 1.0 if dtype == BF16 else float(info.max)
    for field in ("mu", "nu"):
        codes = getattr(state.codes, field)["w"]
        assert codes.dtype == dtype and codes.shape == (64, 512)
        scales = np.asarray(getattr(state.scales, field)["w"], np.float64)
        assert scales.shape == (64, 4)
        held = np.asarray(codes, np.float64) / largest
        exactly = np.asarray(getattr(want, field)["w"], np.float64)
        unit = (exactly.reshape(64, 4, 128) / scales[..., None]).reshape(64, 512)
        # Half a step of a normal number, or of the least one. A second moment below
        # the least number becomes it: a step of it at most.
        least = float(info.smallest_subnormal) / largest
        steps = 1.0 if field == "nu" else 0.5
        bound = np.maximum(np.abs(unit) * float(info.eps) * 0.51, steps * least * 1.01)
        assert (np.abs(held - unit) <= bound).all()
    nu = np.asarray(state.codes.nu["w"], np.float64)
    assert ((nu > 0) == (np.asarray(want.nu["w"]) > 0)).all()
    if dtype in (E4M3, E5M2):
        assert (np.asarray(state.codes.mu["w"], np.float64) == 0).any()


def test_what_is_no_narrow_float_is_refused():
    adam = optax.adam(1e-3)
    for dtypes, says in (({}, "{}"), ({"mu": FP32}, "float32"), ({"mu": "i1"}, "int8")):
        with pytest.raises(ValueError, match=facts("precision_aware", says)):
            fsdp.optim.precision_aware(adam, dtypes)
    with pytest.raises(ValueError, match=facts("block=0", "1")):
        fsdp.optim.precision_aware(adam, {"mu": FP16}, block=0)
    with pytest.raises(ValueError, match=facts("trace", "float16")):
        fsdp.optim.precision_aware(adam, {"trace": FP16}).init(small_params())
