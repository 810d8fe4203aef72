"""Products of sorted rows with their group's matrix, in blocks as on GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge.models import grouped_matmul
from bridge.models._grouped import matrices_in_blocks, rows_in_blocks

EMBED, WIDTH = 6, 10


def arrays(rows, groups, dtype=jnp.float64):
    rng = np.random.default_rng(0)
    shapes = (rows, EMBED), (groups, EMBED, WIDTH), (rows, WIDTH)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize(
    "sizes, rows",
    [
        ([300, 0, 500, 100], 1000),  # rows behind the last group
        ([130, 126, 128, 128], 512),  # groups that end beside a block's end
        ([0, 0, 770, 0], 770),  # rows that blocks do not divide
        ([1, 2, 3], 400),
        ([0, 0], 256),
        ([5] * 64, 320),  # many groups in a block
    ],
)
def test_blocks_make_what_ragged_dot_makes_and_its_gradients(sizes, rows):
    with jax.enable_x64(True):
        x, kernel, grad = arrays(rows, len(sizes))
        sizes = jnp.asarray(sizes, jnp.int32)
        want, pull = jax.vjp(lambda x, k: jax.lax.ragged_dot(x, k, sizes), x, kernel)
        want_x, want_kernel = pull(grad)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
        close(rows_in_blocks(x, kernel, sizes), want)
        found = rows_in_blocks(grad, kernel, sizes, transposed=True)
        close(found, want_x)
        found = matrices_in_blocks(x, grad, sizes, kernel.dtype)
        close(found, want_kernel)


@pytest.mark.parametrize(
    "sizes",
    [
        [300, 0, 500, 100],
        [0, 0, 0, 0],
        [5000, 1, 9, 90],  # as many rows as there is room for
        [134] * 38,  # and rounds that do not divide the visits
    ],
)
def test_blocks_that_are_not_expected_are_left_out_unless_they_are_needed(sizes):
    with jax.enable_x64(True):
        x, kernel, grad = arrays(5100, len(sizes))
        sizes = jnp.asarray(sizes, jnp.int32)
        want = rows_in_blocks(x, kernel, sizes)
        found = rows_in_blocks(x, kernel, sizes, expected=900)
        np.testing.assert_array_equal(found, want)
        want = matrices_in_blocks(x, grad, sizes, kernel.dtype)
        found = matrices_in_blocks(x, grad, sizes, kernel.dtype, expected=900)
        np.testing.assert_array_equal(found, want)


def test_sums_over_blocks_are_made_in_float32():
    rows = 4096
    x, grad = jnp.ones((rows, EMBED), jnp.bfloat16), jnp.ones((rows, WIDTH))
    sizes = jnp.asarray([1, rows - 1], jnp.int32)
    found = matrices_in_blocks(x, grad.astype(x.dtype), sizes, x.dtype)
    assert found.dtype == jnp.bfloat16
    # Block by block in bfloat16 it would stop at 256 ones, or lose the odd one.
    np.testing.assert_array_equal(found[1], jnp.bfloat16(rows - 1))


@pytest.mark.parametrize("sizes", [np.full(4, 128), np.array([128, 128, 0, 256])])
def test_sizes_known_beforehand_and_alike_are_one_batched_product(sizes):
    with jax.enable_x64(True):
        x, kernel, grad = arrays(512, 4)

        def loss(product):
            return lambda x, k: (product(x, k) * grad).sum()

        def of_ragged_dot(x, kernel):
            return jax.lax.ragged_dot(x, kernel, jnp.asarray(sizes, jnp.int32))

        def of_grouped(x, kernel):
            return grouped_matmul(x, kernel, sizes)

        for made in (of_grouped, of_ragged_dot):
            text = str(jax.make_jaxpr(made)(x, kernel))
            assert ("ragged_dot" not in text) == (
                made is of_grouped and len(set(sizes)) == 1
            )
        want = jax.grad(loss(of_ragged_dot), (0, 1))(x, kernel)
        got = jax.grad(loss(of_grouped), (0, 1))(x, kernel)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.plan
def test_on_gpus_memory_does_not_grow_with_the_groups():
    """As it does by `ragged_dot`, which multiplies all rows by every matrix there."""
    from fsdp_jax.planner._compile import gpu_devices
    from fsdp_jax.planner._gpu import GPUS

    (device,) = gpu_devices(GPUS["h200"], 1)
    on_it = jax.sharding.SingleDeviceSharding(device)
    rows, embed, width = 8192, 256, 1024

    def temporaries(product, groups):
        def loss(x, kernel, sizes):
            return jnp.square(product(x, kernel, sizes).astype(jnp.float32)).sum()

        likes = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=on_it)
            for shape, dtype in (
                ((rows, embed), jnp.bfloat16),
                ((groups, embed, width), jnp.bfloat16),
                ((groups,), jnp.int32),
            )
        ]
        lowered = jax.jit(jax.grad(loss, (0, 1))).lower(*likes)
        memory = lowered.compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    of_grouped = [temporaries(grouped_matmul, groups) for groups in (4, 16)]
    of_ragged_dot = [temporaries(jax.lax.ragged_dot, groups) for groups in (4, 16)]
    assert of_grouped[1] < 1.1 * of_grouped[0]
    assert of_ragged_dot[1] > 3 * of_ragged_dot[0]
    assert of_grouped[1] < of_ragged_dot[1] / 10
