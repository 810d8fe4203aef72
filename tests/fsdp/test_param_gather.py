"""Weights gathered in a byte an element: what is computed, and what is sent."""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers import experts
from helpers.compare import host, worst
from helpers.errors import facts
from helpers.hlo import collectives

import fsdp_jax as fsdp
from fsdp_jax.sharding._block_float8_gather import (
    decode_block_float8,
    encode_block_float8,
)
from fsdp_jax.sharding._float8_gather import (
    decode_mxfp8,
    encode_float8,
    encode_mxfp8,
)
from fsdp_jax.sharding._nvfp4_gather import (
    decode_nvfp4,
    encode_nvfp4,
    tensor_exponents,
)

LAYERS, ROWS = 3, 16
SIZES = {"even": (64, 96), "odd": (37, 101), "one even": (37, 96)}
FORMATS = {
    "float8": fsdp.sharding.Float8Gather(min_elements=1024),
    "mxfp8": fsdp.sharding.MXFP8Gather(min_elements=1024),
    "blocks": fsdp.sharding.BlockFloat8Gather(min_elements=1024),
    "nvfp4": fsdp.sharding.NVFP4Gather(min_elements=1024),
}
E4M3 = ml_dtypes.float8_e4m3fn


# The formats, against ml_dtypes


def numbers(shape=(24, 101)):
    """Of magnitudes between 1e-6 and 1e6, zeros and a block of zeros among them."""
    random = np.random.default_rng(0)
    x = random.normal(size=shape) * 10.0 ** random.uniform(-6, 6, size=shape)
    x[:, :3], x[0, 32:64] = 0, 0
    return x.astype(np.float32)


def power_of_two(largest, limit=448):
    """The least one that brings it to 448, what float8_e4m3fn ends at."""
    with np.errstate(divide="ignore"):
        power = np.ceil(np.log2(largest.astype(np.float64) / limit))
    return np.exp2(np.clip(power, -126, 127)).astype(np.float32)


def round_float8(weight, num_stacked):
    """What a weight is after the journey, by ml_dtypes' rounding alone."""
    dims = tuple(range(num_stacked, weight.ndim))
    scale = power_of_two(np.abs(weight).max(dims, keepdims=True))
    return (weight / scale).astype(E4M3).astype(np.float32) * scale


def round_mxfp8(weight, axis):
    moved = np.moveaxis(weight, axis, -1)
    blocks = np.split(moved, range(32, moved.shape[-1], 32), axis=-1)
    rounded = []
    for block in blocks:
        scale = power_of_two(np.abs(block).max(-1, keepdims=True))
        rounded.append((block / scale).astype(E4M3).astype(np.float32) * scale)
    return np.moveaxis(np.concatenate(rounded, -1), -1, axis)


def round_blocks(weight, dims, pieces=1):
    """In blocks of 128 x 128 of each of `pieces` shards along the first of `dims`."""
    moved = np.moveaxis(weight, dims, (-2, -1)).copy()
    for shard in np.split(moved, pieces, axis=-2):
        for row in range(0, shard.shape[-2], 128):
            for col in range(0, shard.shape[-1], 128):
                block = shard[..., row : row + 128, col : col + 128]
                scale = power_of_two(np.abs(block).max((-2, -1), keepdims=True))
                block[...] = (block / scale).astype(E4M3).astype(np.float32) * scale
    return np.moveaxis(moved, (-2, -1), dims)


def round_nvfp4(weight, axis, num_stacked):
    dims = tuple(range(num_stacked, weight.ndim))
    tensor = power_of_two(np.abs(weight).max(dims, keepdims=True), 6 * 448)
    moved = np.moveaxis(weight / tensor, axis, -1)
    rounded = []
    for block in np.split(moved, range(16, moved.shape[-1], 16), axis=-1):
        largest = np.abs(block).max(-1, keepdims=True)
        scale = (largest / np.float32(6)).astype(E4M3).astype(np.float32)
        scaled = block / np.where(scale == 0, 1, scale)
        rounded.append(scaled.astype(ml_dtypes.float4_e2m1fn).astype("f4") * scale)
    return np.moveaxis(np.concatenate(rounded, -1), -1, axis) * tensor


def test_blocks_are_ml_dtypes_rounding_and_end_with_each_shard():
    random = np.random.default_rng(0)
    x = numbers((300, 260)) * 10.0 ** random.uniform(-3, 3, size=(300, 1))
    x = x.astype(np.float32)
    shards = [
        encode_block_float8(jnp.asarray(piece), (-2, -1)) for piece in np.split(x, 2)
    ]
    assert shards[0].scale.shape == (2, 3)
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *shards)
    got = decode_block_float8(joined, (-2, -1), 2, jnp.float32)
    np.testing.assert_array_equal(np.asarray(got), round_blocks(x, (-2, -1), 2))
    assert (round_blocks(x, (-2, -1), 2) != round_blocks(x, (-2, -1))).any()
    across = encode_block_float8(jnp.asarray(x), (-1, -2))
    got = decode_block_float8(across, (-1, -2), 1, jnp.bfloat16)
    np.testing.assert_array_equal(
        np.asarray(got, np.float32), round_blocks(x, (-1, -2))
    )


@pytest.mark.parametrize("axis", [-1, -2])
def test_nvfp4_is_ml_dtypes_rounding_in_half_a_byte(axis):
    x = numbers((24, 102)) if axis == -1 else numbers((102, 24))
    x[0] = np.resize(np.arange(-7, 7, 0.25), x.shape[1])  # ties between neighbours
    largest = jnp.abs(x).max()
    encoded = jax.jit(encode_nvfp4, static_argnums=2)(x, largest, axis)
    assert encoded.bytes.size == x.size // 2
    assert encoded.scale.shape == ((24, 7) if axis == -1 else (7, 24))
    tensor = tensor_exponents(largest)
    got = decode_nvfp4(encoded, tensor, axis, jnp.float32)
    np.testing.assert_array_equal(np.asarray(got), round_nvfp4(x, axis, 0))
    narrow = decode_nvfp4(encoded, tensor, axis, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(narrow, np.float32), np.asarray(got))


def test_float8_is_ml_dtypes_rounding_by_the_largest_magnitude():
    x = numbers()
    encoded = jax.jit(encode_float8)(x, jnp.abs(x).max())
    scale = np.asarray(encoded.scale)[None].view(ml_dtypes.float8_e8m0fnu)
    got = np.asarray(encoded.bytes).view(E4M3).astype(np.float32)
    np.testing.assert_array_equal(got * scale.astype(np.float32), round_float8(x, 0))
    assert scale.astype(np.float32) == power_of_two(np.abs(x).max())


@pytest.mark.parametrize("axis", [-1, -2])
def test_mxfp8_is_ml_dtypes_rounding_by_powers_of_two(axis):
    x = numbers()
    encoded = jax.jit(encode_mxfp8, static_argnums=1)(x, axis)
    exponents = np.asarray(encoded.scale).view(ml_dtypes.float8_e8m0fnu)
    assert exponents.shape == ((24, 4) if axis == -1 else (1, 101))
    got = decode_mxfp8(encoded, axis, jnp.float32)
    np.testing.assert_array_equal(np.asarray(got), round_mxfp8(x, axis))
    # bfloat16 holds four binary digits times a power of two exactly.
    narrow = decode_mxfp8(encoded, axis, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(narrow, np.float32), np.asarray(got))


def test_no_element_is_off_by_more_than_its_format_says():
    x = numbers()
    blocks = np.asarray(decode_mxfp8(encode_mxfp8(x, -1), -1, jnp.float32))
    ends = range(32, x.shape[-1], 32)
    for a, b in zip(np.split(x, ends, -1), np.split(blocks, ends, -1), strict=True):
        # Half a unit of the fourth digit; below 2^-6, where there are fewer, of the
        # last, which is 2^-9 where the largest is at least 224.
        largest = np.abs(a).max(-1, keepdims=True)
        bound = np.maximum(np.abs(a) / 16, largest / 224 / 2**10)
        assert (np.abs(a - b) <= bound).all()
    whole = round_float8(x, 0)
    bound = np.maximum(np.abs(x) / 16, np.abs(x).max() / 224 / 2**10)
    assert (np.abs(x - whole) <= bound).all()
    assert np.linalg.norm(x - blocks) < np.linalg.norm(x - whole)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_does_not_arrive_as_a_number(bad):
    x = numbers()
    x[5, 40] = bad
    got = np.asarray(decode_mxfp8(encode_mxfp8(x, -1), -1, jnp.float32))
    assert not np.isfinite(got[5, 40]) and np.isfinite(got[4]).all()


# The step


def make_weights(sizes):
    embed, mlp = SIZES[sizes]

    def make(key):
        up, down, head = jax.random.split(key, 3)
        # Layers of very different size, so that a scale for all of them would show.
        size = jnp.array([0.01, 0.3, 3.0])[:, None, None]
        return {
            "layers": {
                "up": size * jax.random.normal(up, (LAYERS, embed, mlp)),
                "down": 0.1 * jax.random.normal(down, (LAYERS, mlp, embed)) / size,
                "norm": jnp.ones((LAYERS, embed)),
                "router": 0.1 * jax.random.normal(up, (LAYERS, embed, embed)),
            },
            "head": 0.3 * jax.random.normal(head, (embed, 8)),
        }

    return make


def layer(w, x):
    gate = jax.nn.sigmoid(x @ w["router"])
    inner = jnp.tanh((x * w["norm"][None]) @ w["up"])
    return x + gate * (inner @ w["down"]), None


def loss_of(prefetch=0):
    def loss(weights, batch):
        x, _ = fsdp.scan(layer, weights["layers"], batch["x"], prefetch=prefetch)
        return jnp.mean((x @ weights["head"] - batch["y"]) ** 2)

    return loss


def rows_of(sizes):
    random = np.random.default_rng(0)
    embed, _ = SIZES[sizes]
    x, y = (random.normal(size=(ROWS, n)).astype(np.float32) for n in (embed, 8))
    return {"x": x, "y": y}


def plan_of(kind, sizes="even", mesh=None, policy=None, **config):
    chosen = FORMATS[kind] if isinstance(kind, str) else kind
    policy = fsdp.MixedPrecisionPolicy(param_gather=chosen, **(policy or {}))
    return fsdp.fully_shard(
        make_weights(sizes),
        mesh or fsdp.make_mesh(),
        [fsdp.Stacked("layers")],
        fsdp.FSDPConfig(mp_policy=policy, **config),
    )


def rounded(plan, weights):
    """The weights as units compute with them."""
    layers = {}
    for name, weight in weights["layers"].items():
        param = next(
            param for param in plan.param_plans if param.name == f"layers.{name}"
        )
        if isinstance(param.gather, fsdp.sharding.Float8Gather):
            weight = round_float8(weight, 1)
        elif isinstance(param.gather, fsdp.sharding.NVFP4Gather):
            weight = round_nvfp4(weight, param.block_dim, 1)
        elif isinstance(param.gather, fsdp.sharding.BlockFloat8Gather):
            # With tp a shard is of its part, of another size than 128.
            weight = round_tiles(plan, param, weight)
        elif param.gather:
            weight = round_mxfp8(weight, param.block_dim)
        layers[name] = weight
    return {**weights, "layers": layers}


def round_tiles(plan, param, weight):
    """Shards over data axes, each within one of those over tp."""
    dims = param.split.dim - len(param.shape), param.block_dim
    tensor_dim, tp = param.split.tensor_dim, plan.mesh.shape["tp"]
    widths = [
        (0, param.split.padding if d == param.split.dim else 0)
        for d in range(weight.ndim)
    ]
    padded = np.pad(weight, widths)
    count = math.prod(plan.mesh.shape[axis] for axis in param.placements.optimizer)
    parts = [padded] if tensor_dim is None else np.split(padded, tp, tensor_dim)
    parts = [round_blocks(part, dims, count) for part in parts]
    whole = parts[0] if tensor_dim is None else np.concatenate(parts, tensor_dim)
    return whole[tuple(slice(size) for size in weight.shape)]


@functools.cache
def whole_weights(sizes):
    return host(jax.jit(make_weights(sizes))(jax.random.key(0)))


GRID = {
    "ZeRO-3": ("float8", {}, {}, "even", 0),
    "ZeRO-3, MX": ("mxfp8", {}, {}, "even", 0),
    "odd shapes": ("float8", {}, {}, "odd", 0),
    "odd shapes, MX": ("mxfp8", {}, {}, "odd", 0),
    "prefetched": ("float8", {}, {}, "even", 1),
    "prefetched, MX": ("mxfp8", {}, {}, "odd", 1),
    "kept for backward": ("mxfp8", {}, {"reshard_after_forward": False}, "even", 0),
    "ZeRO-1": ("float8", {}, {"zero_dp_strategy": 1}, "even", 0),
    "ZeRO-2, MX": ("mxfp8", {}, {"zero_dp_strategy": 2}, "odd", 0),
    "HSDP": ("float8", {"dp_outer": 2}, {}, "even", 0),
    "HFSDP": ("float8", {"dp_outer": 2}, {"outer_dp_sharding_strategy": 1}, "odd", 0),
    "HFSDP, MX": (
        *("mxfp8", {"dp_outer": 2}, {"outer_dp_sharding_strategy": 1}, "even", 1),
    ),
    "ZeRO-3, blocks": ("blocks", {}, {}, "odd", 0),
    "HFSDP, blocks": (
        *("blocks", {"dp_outer": 2}, {"outer_dp_sharding_strategy": 1}, "even", 1),
    ),
    "tp, blocks": (
        "blocks",
        {"tp": 2},
        {"tensor_parallel": {"layers.up": 1, "layers.down": 1}},
        *("even", 0),
    ),
    "ZeRO-3, NVFP4": ("nvfp4", {}, {}, "even", 1),
    "ZeRO-1, NVFP4": ("nvfp4", {}, {"zero_dp_strategy": 1}, "even", 0),
    "HFSDP, NVFP4": (
        *("nvfp4", {"dp_outer": 2}, {"outer_dp_sharding_strategy": 1}, "even", 0),
    ),
    "tp, NVFP4": (
        "nvfp4",
        {"tp": 2},
        {"tensor_parallel": {"layers.up": 1, "layers.down": 0}},
        *("even", 0),
    ),
    "tp": (
        "float8",
        {"tp": 2},
        {"tensor_parallel": {"layers.up": 1, "layers.down": 0}},
        *("even", 0),
    ),
    "tp, MX": (
        "mxfp8",
        {"tp": 2},
        {"tensor_parallel": {"layers.up": 1, "layers.down": 1}},
        *("even", 0),
    ),
    # The other dim takes no split, so that data axes and tp split one together.
    "one dim over data axes and tp": (
        "float8",
        {"tp": 2},
        {"tensor_parallel": {"layers.up": 1, "layers.down": 0}},
        *("one even", 0),
    ),
    "one dim over data axes and tp, MX": (
        "mxfp8",
        {"tp": 2},
        {"tensor_parallel": {"layers.up": 1, "layers.down": 0}},
        *("one even", 1),
    ),
}


# Each format, strategy, level and kind of shape once; `make test-long` runs all.
COVERING = {"prefetched", "odd shapes, MX", "ZeRO-1", "HFSDP, MX", "tp, MX"} | {
    "one dim over data axes and tp"
}
COVERING |= {"tp, NVFP4", "HFSDP, blocks"}


def cells():
    return [
        pytest.param(name, marks=() if name in COVERING else (pytest.mark.long,))
        for name in GRID
    ]


@functools.cache
def one_device():
    return jax.jit(jax.value_and_grad(loss_of()))


@pytest.mark.parametrize("name", cells())
def test_gradients_are_those_at_the_rounded_weights(name):
    kind, mesh, config, sizes, prefetch = GRID[name]
    plan = plan_of(kind, sizes, fsdp.make_mesh(**mesh), **config)
    assert [param.name for param in plan.param_plans if param.gather] == [
        f"layers.{name}" for name in ("down", "router", "up")
    ]
    weights, data = whole_weights(sizes), rows_of(sizes)
    want_loss, want = one_device()(rounded(plan, weights), data)
    params = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), weights, plan.params
    )
    compute = fsdp.value_and_grad(plan, loss_of(prefetch), num_microbatches=2)
    (loss, _), grads = compute(params, data)
    assert float(loss) == pytest.approx(float(want_loss), rel=1e-5)
    # Both sum the same products in float32, in another order.
    assert worst(grads, want) < 5e-5
    # Rounding of 2^-4 an element is far above what these two may differ by.
    _, exact = one_device()(weights, data)
    assert worst(grads, exact) > 1e-3


@pytest.mark.parametrize(
    "kind", ["float8", pytest.param("mxfp8", marks=pytest.mark.long)]
)
def test_experts_are_gathered_over_the_other_axes_by_scales_of_their_own_rank(kind):
    policy = fsdp.MixedPrecisionPolicy(param_gather=FORMATS[kind])
    plan = experts.plan_of(fsdp.make_mesh(dp_outer=2, ep=2), mp_policy=policy)
    weights = host(jax.jit(experts.make_weights)(jax.random.key(0)))
    own = dict(weights["layers"]["experts"])
    rows = [param for param in plan.param_plans if param.gather]
    assert [param.name for param in rows] == [
        "layers.experts.down",
        "layers.experts.up",
    ]
    for param in rows:
        name = param.name.rpartition(".")[2]
        parts = np.split(own[name], 2, axis=1)
        own[name] = np.concatenate(
            [
                round_float8(part, 1)
                if kind == "float8"
                else round_mxfp8(part, param.block_dim)
                for part in parts
            ],
            axis=1,
        )
    rounded = weights | {"layers": weights["layers"] | {"experts": own}}
    data, one = experts.batch(np.float32), fsdp.make_mesh(devices=jax.devices()[:1])

    def grads_of(plan, weights, **options):
        compute = fsdp.value_and_grad(plan, experts.loss_of(**options), has_aux=True)
        likes = plan.params
        placed = jax.tree.map(
            lambda x, m: jax.device_put(x, m.sharding), weights, likes
        )
        return compute(placed, data)[1]

    alone = experts.plan_of(one)
    grads = grads_of(plan, weights, prefetch=1)
    assert worst(grads, grads_of(alone, rounded)) < 2e-5
    assert worst(grads, grads_of(alone, weights)) > 1e-3


@pytest.mark.parametrize("kind", FORMATS)
def test_a_step_updates_float32_and_sends_bytes(kind):
    tx = optax.sgd(0.1)
    plan = plan_of(kind, policy={"param_dtype": jnp.bfloat16})
    step = fsdp.make_train_step(plan, loss_of(1), tx, num_microbatches=2)
    data = rows_of("even")
    lowered = step.lower(fsdp.abstract_state(plan, tx), data)
    fsdp.audit_step(plan, lowered, num_microbatches=2)
    compiled = lowered.compile()
    fsdp.audit_step(plan, compiled, num_microbatches=2)
    gathers = [c for c in collectives(compiled.as_text() or "") if c.op == "all-gather"]
    assert all(c.dtype == "u8" for c in gathers if c.size >= 1024)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(plan.params))
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    before = host(state.params)
    state, _ = step(state, data)
    after = host(state.params)
    # What an update adds is less than a step of the format.
    moved = np.abs(after["layers"]["up"] - before["layers"]["up"]).max((1, 2))
    assert (0 < moved).all() and moved[2] < 3.0 / 16


def test_an_audit_finds_weights_communicated_wider_than_planned():
    tx = optax.sgd(0.1)
    plan, wide = plan_of("mxfp8"), plan_of(None)
    step = fsdp.make_train_step(wide, loss_of(), tx)
    lowered = step.lower(fsdp.abstract_state(wide, tx), rows_of("even"))
    with pytest.raises(
        fsdp.audit.AuditError,
        match=facts("'layers.router'", "u8[8,64]", "f32[8,64]"),
    ):
        fsdp.audit_step(plan, lowered)


# The plan


def test_the_plan_says_what_is_communicated_in_bytes():
    excluding = fsdp.sharding.MXFP8Gather(exclude=("layers.router",), min_elements=1024)
    plan = plan_of(excluding, policy={"param_dtype": jnp.bfloat16})
    gathered = {param.name: param.gather for param in plan.param_plans}
    assert gathered == {
        "head": None,
        "layers.down": excluding,
        "layers.norm": None,
        "layers.router": None,
        "layers.up": excluding,
    }
    elements = 2 * LAYERS * 64 * 96 // 8
    assert plan.quantized_bytes == elements + elements // 32
    text = repr(plan)
    assert "quantized to be gathered: 2 as mxfp8_e4m3fn, 4.64 KiB a device" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert "mxfp8_e4m3fn" in lines["layers.up"]
    assert "bfloat16" in lines["layers.router"]


def test_what_would_do_nothing_is_refused():
    with pytest.raises(
        ValueError,
        match=facts("FSDPConfig(zero_dp_strategy='no_shard')", "param_gather"),
    ):
        plan_of("float8", zero_dp_strategy=0)
    with pytest.raises(
        ValueError, match=facts("min_elements=1000000", "units=[LayerClass]")
    ):
        plan_of(fsdp.sharding.Float8Gather(min_elements=10**6))
    with pytest.raises(
        ValueError, match=facts("param_gather.exclude", "'layers.rooter'")
    ):
        plan_of(fsdp.sharding.Float8Gather(exclude=("layers.rooter",)))
    with pytest.raises(ValueError, match=facts("exclude=('layers.router',)")):
        fsdp.sharding.Float8Gather(exclude=cast(Any, "layers.router"))
    alone = plan_of("mxfp8", mesh=fsdp.make_mesh(devices=jax.devices()[:1]))
    assert not any(param.gather for param in alone.param_plans)
