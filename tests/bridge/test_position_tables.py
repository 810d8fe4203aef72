"""Positions of ALiBi are exact in the dtype of the products, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.errors import facts

from bridge.models._layer_inputs import _two_summands

EXACT = {jnp.bfloat16: 2**16, jnp.float16: 65504}
"""Positions below which both summands are exact."""


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_position_is_the_sum_of_its_two_summands(dtype):
    positions = np.arange(EXACT[jnp.bfloat16])[None]
    summands = np.asarray(_two_summands(jnp.asarray(positions), dtype), np.float64)
    np.testing.assert_array_equal(summands.sum(-1), positions)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_longer_rows_are_refused(dtype):
    def lower(length):
        positions = jax.ShapeDtypeStruct((1, length), jnp.int32)
        return jax.eval_shape(lambda p: _two_summands(p, dtype), positions)

    assert lower(EXACT[dtype]).shape == (1, EXACT[dtype], 2)
    with pytest.raises(ValueError, match=facts(f"{EXACT[dtype] + 1:,}", "float32")):
        lower(EXACT[dtype] + 1)
