"""Tokens go to their experts in float8, rounded once, whatever the number of ranks."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers.errors import facts
from helpers.experts import TX, batch, loss_of, plan_of
from jax.sharding import PartitionSpec as P

import fsdp_jax as fsdp
from fsdp_jax import ops

TOKENS, EMBED, EXPERTS, CHOSEN = 24, 160, 8, 3  # a tile of 128, and one of 32
PACKED = 176  # 160 bytes, 2 scales, and zeros up to a multiple of 16
FLOAT8 = jnp.float8_e4m3fn
# With room for all, since which tokens are dropped depends on the number of ranks.
ROOMY = functools.partial(ops.expert_capacity_dispatch, capacity_factor=8.0)
DISPATCHES = {"dropless": ops.expert_parallel_dispatch, "capacity": ROOMY}
every_dispatch = pytest.mark.parametrize("name", DISPATCHES)
every_ranks = pytest.mark.parametrize("ranks", [1, 4])


def tokens(seed=0):
    """Tokens whose magnitudes differ by tile, their choices, and a gradient."""
    random = np.random.default_rng(seed)
    scale = np.exp2(random.integers(-20, 20, (TOKENS, EMBED // 32)).repeat(32, axis=1))
    x, grad = random.normal(size=(2, TOKENS, EMBED)) * scale
    scores = random.random((TOKENS, EXPERTS))
    experts = np.argsort(-scores, axis=-1)[:, :CHOSEN]
    weights = np.take_along_axis(scores, experts, axis=-1)
    wide = [a.astype(np.float32) for a in (x, weights, grad)]
    return wide[0], experts, wide[1], wide[2]


def rounded(x, dtype=ml_dtypes.float8_e4m3fn):
    """Rounds tiles of 128 by the least power of two at which none is clipped."""
    largest = float(ml_dtypes.finfo(dtype).max)
    made = np.zeros_like(x)
    for row, start in np.ndindex(len(x), -(-x.shape[1] // 128)):
        at = row, slice(128 * start, 128 * start + 128)
        if most := np.abs(x[at]).max():
            scale = np.exp2(np.ceil(np.log2(most / largest)))
            made[at] = (x[at] / scale).astype(dtype).astype(np.float32) * scale
    return made


def on_ranks(name, ranks, dtype=FLOAT8, run=None):
    """`fn(gains of experts, x, experts, weights)` on global arrays, over `ranks`."""

    def local(gain, x, experts, weights):
        own = run or functools.partial(scaled, gain)
        dispatch = functools.partial(DISPATCHES[name], dispatch_dtype=dtype)
        return dispatch(own, x, experts, weights, EXPERTS)[0]

    mesh = fsdp.make_mesh(ep=ranks, devices=jax.devices()[:ranks])
    specs = {"mesh": mesh, "in_specs": P("ep"), "out_specs": P("ep")}
    return jax.jit(jax.shard_map(local, check_vma=False, **specs))


def scaled(gain, rows, group_sizes):
    """What is linear in a row, so that an error is that of the row."""
    sizes = jnp.asarray(group_sizes)
    owner = jnp.repeat(jnp.arange(len(gain)), sizes, total_repeat_length=len(rows))
    return rows * jnp.take(gain, owner)[:, None]


GAIN = np.linspace(0.5, 2.0, EXPERTS, dtype=np.float32)


def outputs_and_gradients(name, ranks, x, grad, dtype=FLOAT8):
    _, experts, weights, _ = tokens()

    def of(gain, x, weights):
        return on_ranks(name, ranks, dtype)(gain, x, experts, weights)

    y, pull = jax.vjp(of, GAIN, x, weights)
    return y, pull(jnp.asarray(grad))


def close(a, b):
    """Equal but for the order of sums over ranks and choices, in float32."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6 * np.abs(y).max())


@every_ranks
@every_dispatch
def test_it_is_the_plain_dispatch_of_rounded_tokens_and_gradients(name, ranks):
    x, _, _, grad = tokens()
    got = outputs_and_gradients(name, ranks, x, grad)
    close(got, outputs_and_gradients(name, ranks, rounded(x), rounded(grad), None))
    # Gradients that were not rounded, or tokens, would be noticed.
    for other in ((x, rounded(grad)), (rounded(x), grad)):
        with pytest.raises(AssertionError):
            close(got, outputs_and_gradients(name, ranks, *other, None))


@every_dispatch
def test_the_numbers_do_not_depend_on_the_number_of_ranks(name):
    x, _, _, grad = tokens()
    close(*(outputs_and_gradients(name, ranks, x, grad) for ranks in (4, 1)))


@every_dispatch
def test_errors_are_those_of_three_bits_and_smaller_than_those_of_two(name):
    x, experts, weights, _ = tokens()
    got, plain = (
        on_ranks(name, 4, dtype)(GAIN, x, experts, weights) for dtype in (FLOAT8, None)
    )
    # Half of the last of 3 bits, and half of the least subnormal number of a tile.
    of_weights = (weights * GAIN[experts]).sum(-1, keepdims=True)
    tiles = [np.abs(t).max(1, keepdims=True) for t in np.split(x, [128], axis=1)]
    most = np.repeat(np.concatenate(tiles, axis=1), [128, EMBED - 128], axis=1)
    bound = 1.001 * of_weights * np.maximum(np.abs(x) / 16, most / 224 * 2**-10)
    assert (np.abs(got - plain) <= bound).all()
    coarse = of_weights * rounded(x, ml_dtypes.float8_e5m2)
    assert (np.abs(coarse - plain) > bound).mean() > 0.1


@every_dispatch
def test_numbers_of_four_significant_bits_arrive_to_the_bit(name):
    random = np.random.default_rng(0)
    x, grad = random.integers(-15, 16, (2, TOKENS, EMBED)).astype(np.float32)
    got, plain = (
        outputs_and_gradients(name, 4, x, grad, dtype) for dtype in (FLOAT8, None)
    )
    np.testing.assert_array_equal(got[0], plain[0])
    close(got[1], plain[1])  # Sums of three in another order.
    with pytest.raises(AssertionError):  # 17 has five bits.
        close(outputs_and_gradients(name, 4, x + 17, grad), plain)


@every_ranks
@every_dispatch
def test_a_token_that_is_not_a_number_stays_visible_and_alone(name, ranks):
    x, experts, weights, _ = tokens()
    x[3, 5], x[7, 140], x[11] = np.nan, np.inf, 0
    got = on_ranks(name, ranks)(GAIN, x, experts, weights)
    is_nan = np.isnan(got)
    # A tile is NaN if one of its numbers is NaN or infinity; no other tile is.
    assert is_nan[3, :128].all() and is_nan[7, 128:].all()
    assert is_nan.sum() == 128 + (EMBED - 128)
    assert not got[11].any() and np.isfinite(got[~is_nan]).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_tokens_of_16_bits_arrive_in_their_dtype(dtype):
    x, experts, weights, _ = tokens()
    x = (x / np.abs(x).max(1, keepdims=True)).astype(dtype)
    seen = []

    def run(rows, _):
        seen.append(rows.dtype)
        return rows

    ones = np.ones_like(weights) / CHOSEN
    got = on_ranks("dropless", 4, run=run)(GAIN, x, experts, ones)
    assert {*seen, got.dtype} == {jnp.dtype(dtype)}
    # Sums of three equal numbers, rounded once to the dtype of x.
    want = rounded(np.asarray(x, np.float32))
    error = np.abs(np.asarray(got, np.float32) - want)
    assert (error <= np.abs(want) * float(jnp.finfo(dtype).eps) + 1e-9).all()


def sent(text):
    """Bytes of an element and width of what each all-to-all carries, sorted."""
    pattern = r'all_to_all["(].*?: \(tensor<\d+x(\d+)x(\w+)>'
    found = re.findall(pattern, text)
    return sorted((dtype, int(width)) for width, dtype in found)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@every_dispatch
def test_what_goes_to_experts_are_bytes_and_what_comes_back_is_not(name, platform):
    x, experts, weights, _ = tokens()

    def loss(gain, x, weights):
        @jax.checkpoint
        def layer(gain, x, weights):
            return on_ranks(name, 4)(gain, x, experts, weights)

        return jnp.sin(layer(gain, x, weights)).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(
        GAIN.astype(jnp.bfloat16), x.astype(jnp.bfloat16), weights
    )
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    # Tokens there, again in the recomputation, and the gradients of the sums; outputs
    # and the gradients of tokens back; and a number of each choice both ways.
    assert sent(text) == [
        ("bf16", EMBED),
        ("bf16", EMBED),
        ("f32", 1),
        ("f32", 1),
        *[("ui8", PACKED)] * 3,
    ]


@pytest.mark.parametrize("embed", [EMBED, 512])
@every_dispatch
def test_under_tp_each_rank_sends_its_part_of_the_bytes(name, embed):
    random = np.random.default_rng(0)
    x = random.normal(size=(TOKENS, embed)).astype(np.float32)
    _, experts, weights, _ = tokens()

    def on(mesh, x):
        def local(x, experts, weights):
            dispatch = functools.partial(DISPATCHES[name], dispatch_dtype=FLOAT8)
            return dispatch(lambda rows, _: rows, x, experts, weights, EXPERTS)[0]

        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=P("ep"),
            out_specs=P("ep"),
            axis_names={"ep"},
            check_vma=False,
        )
        return jax.jit(mapped).lower(x, experts, weights)

    one = on(fsdp.make_mesh(ep=4, devices=jax.devices()[:4]), x)
    two = on(fsdp.make_mesh(ep=4, tp=2), x)
    (width,) = {width for dtype, width in sent(two.as_text()) if dtype == "ui8"}
    assert width == {EMBED: PACKED // 2, 512: 256 + 16}[embed]
    close(*(low.compile()(x, experts, weights) for low in (two, one)))


@pytest.mark.parametrize("dtype", ["float8_e5m2", "bfloat16"])
@every_dispatch
def test_another_dtype_is_refused(name, dtype):
    x, experts, weights, _ = tokens()
    with pytest.raises(
        ValueError, match=facts(f"dispatch_dtype={dtype}", "float8_e4m3fn")
    ):
        on_ranks(name, 1, dtype)(GAIN, x, experts, weights)


def test_a_model_whose_tokens_go_in_float8_converges_as_in_bfloat16():
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    plan = plan_of(fsdp.make_mesh(ep=4), mp_policy=policy)

    def losses(dtype):
        dispatch = functools.partial(ops.expert_parallel_dispatch, dispatch_dtype=dtype)
        step = fsdp.make_train_step(plan, loss_of(dispatch), TX, has_aux=True)
        state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
        found = []
        for _ in range(25):
            state, metrics = step(state, batch(jnp.bfloat16))
            found.append(float(metrics["loss"]))
        return np.asarray(found)

    plain, narrow = losses(None), losses(FLOAT8)
    assert (narrow != plain).any()
    # As low as that of bfloat16, three of 25 steps later at most; it began at 30.
    assert narrow[-1] <= plain[-4] < 0.05 * plain[0]
