"""Block-scaled weights are bit by bit what transformers makes of them, where it can."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from bridge_helpers import like_of
from helpers.errors import facts
from test_block_scaled import FP8, MXFP4, mxfp4_tensors, opened
from tiny_configs import hf_fields
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import (
    Fp8Dequantize,
    _dequantize_fp8_weight,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import bridge
from bridge.formats._block_scaled import decode_block_scaled
from bridge.hf._config import find_family
from bridge.streaming._load import load

pytestmark = pytest.mark.torch

BLOCK = (128, 128)
CONFIG = FP8 | {"weight_block_size": [*BLOCK]}


def as_fp8(bits: np.ndarray, scales: np.ndarray) -> dict[str, np.ndarray]:
    weight = bits.view(ml_dtypes.float8_e4m3fn)
    return {"w.weight": weight, "w.weight_scale_inv": scales}


def random_fp8(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    bits = random.integers(0, 255, (rows, columns), np.uint8)
    bits[bits % 128 == 127] = 0  # NaN, whose bits each library chooses for itself
    blocks = -(-rows // 128), -(-columns // 128)
    return bits, random.uniform(1e-5, 3, blocks).astype(np.float32)


def as_torch(bits: np.ndarray, scales: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(bits).view(torch.float8_e4m3fn), torch.tensor(scales)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint16).numpy()


def test_fp8_is_decoded_as_transformers_decodes_it(tmp_path):
    bits, scales = random_fp8(384, 256)
    dequantize = Fp8Dequantize(None)._dequantize_one
    expected = dequantize(*as_torch(bits, scales), output_dtype=torch.bfloat16)
    source = opened(tmp_path / "a.safetensors", as_fp8(bits, scales))
    read = decode_block_scaled(source, CONFIG).read("w.weight")
    np.testing.assert_array_equal(read.view(np.uint16), bits_of(expected))


@pytest.mark.parametrize("shape", [(192, 256), (576, 200), (1, 129), (130, 128)])
def test_short_last_blocks_are_decoded_as_transformers_trains_on_them(tmp_path, shape):
    bits, scales = random_fp8(*shape)
    weight = _dequantize_fp8_weight(*as_torch(bits, scales), [*BLOCK], torch.float32)
    source = opened(tmp_path / "a.safetensors", as_fp8(bits, scales))
    read = decode_block_scaled(source, CONFIG).read("w.weight")
    np.testing.assert_array_equal(read.view(np.uint16), bits_of(weight.bfloat16()))


def test_transformers_loads_short_last_blocks_by_the_wrong_scales():
    bits, scales = as_torch(*random_fp8(192, 256))  # 128 rows and 64
    loaded = Fp8Dequantize(None)._dequantize_one(bits, scales)
    weight = _dequantize_fp8_weight(bits, scales, [*BLOCK], torch.float32)
    same_row = (loaded == weight).all(dim=1)
    assert same_row.nonzero().flatten().tolist() == [*range(96), *range(128, 192)]
    with pytest.raises(ValueError, match=facts("(576, 256)", "(5, 2)")):
        Fp8Dequantize(None)._dequantize_one(*as_torch(*random_fp8(576, 256)))


def test_mxfp4_is_decoded_as_transformers_decodes_it(tmp_path):
    tensors = mxfp4_tensors(3, 64, 300)
    # Every scale but 255, NaN by the format: transformers reads it as infinity.
    scales = np.arange(3 * 300 * 2, dtype=np.uint32).reshape(3, 300, 2) % 255
    tensors["up_proj_scales"] = scales.astype(np.uint8)
    blocks, scales = (torch.tensor(array) for array in tensors.values())
    expected = convert_moe_packed_tensors(blocks, scales)
    source = opened(tmp_path / "a.safetensors", tensors)
    read = decode_block_scaled(source, MXFP4).read("up_proj")
    assert read.shape == tuple(expected.shape) == (3, 64, 300)
    np.testing.assert_array_equal(
        np.ascontiguousarray(read).view(np.uint16), bits_of(expected)
    )


def released(shape: tuple[int, ...], key: str) -> dict[str, np.ndarray]:
    """A random tensor of a GPT-OSS checkpoint as it is released: experts in mxfp4."""
    if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
        packed = mxfp4_tensors(*shape).items()
        return {name.replace("up_proj", key): array for name, array in packed}
    values = np.random.default_rng(0).normal(size=shape)
    return {key: values.astype(ml_dtypes.bfloat16)}


def test_a_gpt_oss_release_is_what_transformers_loads(tmp_path):
    changes = {"hidden_size": 64, "intermediate_size": 96, "dtype": "bfloat16"}
    quantization = MXFP4 | {"dequantize": True}
    fields = hf_fields("gpt_oss", quantization_config=quantization, **changes)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = bridge.from_hf_config(tmp_path)
    mapping = find_family("gpt_oss").mapping(config)
    tensors = {}
    for key, pieces in mapping.by_source().items():
        tensors |= released(pieces[0].source_shape, key)
    source = opened(tmp_path / "model.safetensors", tensors)
    source = decode_block_scaled(source, quantization)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert set(source.keys()) == set(expected)
    for key, tensor in expected.items():
        bits = np.ascontiguousarray(source.read(key)).view(np.uint16)
        np.testing.assert_array_equal(bits, bits_of(tensor), key)
    params = load(source, mapping, like_of(config, jnp.bfloat16))
    loaded = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert loaded == sum(tensor.numel() for tensor in expected.values())
