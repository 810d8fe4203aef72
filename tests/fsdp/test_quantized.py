"""Weights of a frozen base in 8 and in 4 bits: codes, scales, and back."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from golden.write_nf4 import FILE, weight

from fsdp_jax.lora._blockwise_quantization import NF4, dequantize, quantize


def golden() -> dict[str, np.ndarray]:
    told = json.loads(FILE.read_text())
    kinds = {"codes": np.uint8, "scales": np.float32, "decoded": np.float32}
    return {n: np.frombuffer(bytes.fromhex(told[n]), kind) for n, kind in kinds.items()}


def test_nf4_is_that_of_bitsandbytes_to_the_bit():
    want = golden()
    codes, scales = quantize(jnp.asarray(weight()), "nf4")
    np.testing.assert_array_equal(codes, want["codes"])
    np.testing.assert_array_equal(scales, want["scales"])
    decoded = dequantize(codes, scales, (8, 64), "nf4")
    np.testing.assert_array_equal(np.ravel(decoded), want["decoded"])


@pytest.mark.parametrize("shape", [(8, 64), (3, 5, 7), (64,), (1, 1)])
@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_each_element_is_the_nearest_value_of_its_block(shape, form):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    codes, scales = quantize(jnp.asarray(x), form)
    values = NF4 if form == "nf4" else np.arange(-127, 128, dtype=np.float32) / 127
    filled = np.zeros(-(-x.size // 64) * 64, np.float32)
    filled[: x.size] = x.ravel()
    blocks = filled.reshape(-1, 64)
    np.testing.assert_array_equal(scales, np.abs(blocks).max(1))
    unit = blocks / np.asarray(scales)[:, None]
    nearest = values[np.abs(unit[..., None] - values).argmin(-1)]
    want = (nearest * np.asarray(scales)[:, None]).ravel()[: x.size].reshape(shape)
    got = np.asarray(dequantize(codes, scales, shape, form))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=0)
    assert codes.nbytes == filled.size // (2 if form == "nf4" else 1)


@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_zeros_and_what_is_written_in_codes_come_back_to_the_bit(form):
    assert not np.asarray(dequantize(*quantize(jnp.zeros(70), form), (70,), form)).any()
    x = jnp.asarray(weight())
    once = dequantize(*quantize(x, form), x.shape, form)
    again = dequantize(*quantize(once, form), x.shape, form)
    np.testing.assert_array_equal(once, again)
