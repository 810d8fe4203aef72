"""Quantized checkpoints read as the numbers they stand for, box by box."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import quantized_writers as writers
from bridge_helpers import (
    HF_CONFIG,
    assert_same_bytes,
    like_of,
    random_tensors,
    tensors_of,
)
from helpers.errors import facts
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_writers import BF16, E4M3, Writer, Written
from safetensors.numpy import save_file

import bridge
from bridge._tree import named_leaves
from bridge.formats.quantized._decode import decode_quantized

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {}}}
MODELOPT = {"quant_algo": "FP8", "producer": {"name": "modelopt"}}
MIXED = MODELOPT | {
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "a": {"quant_algo": "FP8"},
        "b": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    },
}
TENSOR_FP8 = {"quant_method": "fp8", "weight_block_size": None}


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"weights": weights, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
    }


def of_tensor(out, inputs):
    return (1,)


def of_rows(out, inputs):
    return out, 1


def of_blocks(out, inputs):
    return -(-out // 32), -(-inputs // 32)


part = functools.partial
ROWS: dict[str, Any] = {"grid": of_rows, "block": (1, 1 << 20)}
WHOLE: dict[str, Any] = {"grid": of_tensor, "block": (1 << 20, 1 << 20)}
# Settings, writer of one weight, and the dtype that config.json says.
FORMATS: dict[str, tuple[dict[str, Any], Writer, np.dtype]] = {
    "gptq": (GPTQ, writers.gptq, F16),
    **{
        f"gptq of GPTQModel, {bits} bits": (
            GPTQ | {"bits": bits, "meta": {"quantizer": ["gptqmodel:5.0"]}},
            part(writers.gptq, bits=bits, borrows=True),
            F16,
        )
        for bits in (2, 4, 8)
    },
    "gptq of 2 bits, v2": (
        GPTQ | {"bits": 2, "checkpoint_format": "gptq_v2"},
        part(writers.gptq, bits=2, v2=True),
        F16,
    ),
    "gptq of 8 bits, reordered": (
        GPTQ | {"bits": 8, "desc_act": True},
        part(writers.gptq, bits=8, shuffled=True),
        BF16,
    ),
    "awq": (AWQ, writers.awq, F16),
    "bitsandbytes int8": (BNB, writers.bnb_int8, F16),
    "bitsandbytes nf4": (BNB, writers.bnb_4bit, BF16),
    "bitsandbytes nf4 of nf4": (BNB, part(writers.bnb_4bit, nested=True), BF16),
    "bitsandbytes nf4 in bfloat16": (BNB, part(writers.bnb_4bit, storage=BF16), BF16),
    "int8": (
        compressed("int-quantized", num_bits=8, strategy="channel"),
        part(writers.plain, scale_dtype=BF16, **ROWS),
        BF16,
    ),
    "int8 with zeros": (
        compressed("int-quantized", num_bits=8, strategy="tensor"),
        part(writers.plain, asymmetric=True, **WHOLE),
        BF16,
    ),
    "packed int4": (
        compressed("pack-quantized", num_bits=4, group_size=16),
        writers.packed,
        BF16,
    ),
    "packed int4 with zeros, reordered": (
        compressed("pack-quantized", num_bits=4, group_size=16),
        part(writers.packed, asymmetric=True, shuffled=True),
        BF16,
    ),
    "packed int8": (
        compressed("pack-quantized", num_bits=8, group_size=16),
        part(writers.packed, bits=8),
        BF16,
    ),
    "fp8 of rows": (
        compressed("float-quantized", num_bits=8, type="float"),
        part(writers.plain, codes=E4M3, **ROWS),
        BF16,
    ),
    "fp8 of blocks": (
        compressed("float-quantized", num_bits=8, block_structure=[32, 32]),
        part(writers.plain, codes=E4M3, grid=of_blocks, block=(32, 32)),
        BF16,
    ),
    "FBGEMM": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        part(writers.plain, codes=E4M3, **ROWS),
        BF16,
    ),
    "Model Optimizer": (
        MODELOPT,
        part(writers.plain, codes=E4M3, **WHOLE),
        BF16,
    ),
    "NVFP4": (MODELOPT | {"quant_algo": "NVFP4"}, writers.nvfp4, BF16),
    "NVFP4 beside fp8": (MIXED, writers.nvfp4, F32),
    "MXFP8": (MODELOPT | {"quant_algo": "MXFP8"}, writers.mxfp8, BF16),
    "fp8 of tensors": (
        TENSOR_FP8,
        part(writers.plain, codes=E4M3, scale="weight_scale_inv", **WHOLE),
        BF16,
    ),
    **{
        f"torchao {kind}": (TORCHAO, part(writers.torchao, kind=kind), BF16)
        for kind in (
            *("Float8Tensor", "Int4Tensor", "Int8Tensor"),
            "IntxUnpackedToInt8Tensor",
        )
    },
}


def write(
    path: Path, name: str, config: dict[str, Any], quantized: list[str]
) -> dict[str, np.ndarray]:
    """Writes a Llama with some weights quantized, and returns what it stands for."""
    quantization, writer, dtype = FORMATS[name]
    random = np.random.default_rng(0)
    tensors = random_tensors(dtype)
    expected, metadata = dict(tensors), {"format": "pt"}
    for key in quantized:
        shape = tensors.pop(key).shape
        found = writer(random, key.removesuffix(".weight"), shape, dtype)
        tensors |= found.tensors
        metadata |= found.metadata
        expected[key] = found.values
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata=metadata)
    fields = HF_CONFIG | config | {"torch_dtype": dtype.name}
    fields["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(fields))
    return expected


# All seven projections of a layer: three shapes, and q, k and v of one source.
LAYER = [
    f"model.layers.1.{module}_proj.weight"
    for module in (
        *("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o"),
        *("mlp.gate", "mlp.up", "mlp.down"),
    )
]


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_is_imported_as_the_numbers_it_stands_for(tmp_path, name):
    expected = write(tmp_path / "in", name, {}, LAYER)
    config = bridge.from_hf_config(tmp_path / "in")
    assert config.dtype == FORMATS[name][2].name
    params = bridge.load_hf(tmp_path / "in", like_of(config, jnp.dtype(config.dtype)))
    bridge.save_hf(tmp_path / "out", params, config)
    assert_same_bytes(tensors_of(tmp_path / "out"), expected)
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in saved
    lazy, _ = bridge.lazy_hf(tmp_path / "in")
    same = named_leaves(params)["layers.mlp.up_proj.kernel"]
    np.testing.assert_array_equal(lazy["layers.mlp.up_proj.kernel"][()], same)


@pytest.mark.parametrize("bits, shape", [(3, (32, 64)), (3, (64, 32)), (2, (16, 48))])
def test_gptq_codes_may_continue_in_the_next_integer(tmp_path, bits, shape):
    quantization = GPTQ | {"bits": bits}
    written = writers.gptq(np.random.default_rng(1), "w", shape, F16, bits=bits)
    read = opened(tmp_path, written.tensors, quantization, F16).read("w.weight")
    np.testing.assert_array_equal(read, written.values)
    del written.tensors["w.g_idx"]  # the groups follow from the positions
    read = opened(tmp_path, written.tensors, quantization, F16).read("w.weight")
    np.testing.assert_array_equal(read, written.values)


def opened(path: Path, tensors, quantization, dtype=BF16, metadata=None):
    save_file(tensors, path / "a.safetensors", metadata=metadata)
    source = bridge.open_checkpoint(path / "a.safetensors")
    return decode_quantized(source, quantization, dtype)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[tuple[bridge.Source, Written]]:
    found = []
    for name, (quantization, writer, dtype) in FORMATS.items():
        path = tmp_path_factory.mktemp(name.replace(" ", "_"))
        written = writer(np.random.default_rng(2), "w", (48, 64), dtype)
        source = opened(path, written.tensors, quantization, dtype, written.metadata)
        found.append((source, written))
    return found


@settings(deadline=None, max_examples=150)
@given(st.integers(0, len(FORMATS) - 1), st.data())
def test_a_box_is_a_slice_of_the_weight(sources, number, data):
    source, written = sources[number]
    assert source.keys() == ("w.weight",)
    assert source.shape("w.weight") == (48, 64)
    ends = [st.tuples(st.integers(-1, n), st.integers(0, n)) for n in (48, 64)]
    index = tuple(slice(*data.draw(e)) for e in ends[: data.draw(st.integers(0, 2))])
    box, expected = source.read("w.weight", index), written.values[index]
    assert (box.shape, box.dtype) == (expected.shape, source.dtype("w.weight"))
    assert box.tobytes() == expected.tobytes()


def test_a_band_of_outputs_reads_each_byte_of_a_scattered_weight_once(
    tmp_path, bytes_read
):
    written = writers.gptq(np.random.default_rng(0), "w", (64, 96), F16)
    source = opened(tmp_path, written.tensors, GPTQ, F16)
    bytes_read.clear()
    bands = [source.read("w.weight", (slice(i, i + 16),)) for i in range(0, 64, 16)]
    np.testing.assert_array_equal(np.concatenate(bands), written.values)
    groups = written.tensors["w.g_idx"].nbytes
    stored = sum(array.nbytes for array in written.tensors.values())
    assert sum(bytes_read) == stored + 3 * groups  # those are read by each band


def test_a_box_of_rows_reads_its_own_bytes(tmp_path, bytes_read):
    random = np.random.default_rng(0)
    nf4 = writers.bnb_4bit(random, "w", (32, 64), BF16)
    source = opened(tmp_path, nf4.tensors, BNB)
    bytes_read.clear()
    source.read("w.weight", (slice(3, 7),))
    assert sum(bytes_read) == 4 * 32 + 4 * 4 + 16 * 4  # codes, scales, the table
    packed = writers.packed(random, "w", (32, 64), BF16)
    source = opened(tmp_path, packed.tensors, FORMATS["packed int4"][0])
    bytes_read.clear()
    source.read("w.weight", (slice(3, 7),))
    assert sum(bytes_read) == 4 * 32 + 4 * 4 * 2


def test_what_quantizes_activations_is_left_out_with_a_warning(tmp_path):
    settings, writer, _ = FORMATS["fp8 of rows"]
    written = writer(np.random.default_rng(0), "w", (8, 16), BF16)
    beside = {"w.input_scale": np.ones(1), "k.k_scale": np.ones(1)}
    with pytest.warns(UserWarning, match=facts(2, "k.k_scale")):
        source = opened(tmp_path, written.tensors | beside, settings)
    assert source.keys() == ("w.weight",)


def test_weights_of_one_checkpoint_may_be_of_four_bits_or_of_eight(tmp_path):
    random = np.random.default_rng(0)
    four = writers.nvfp4(random, "a", (8, 32), BF16)
    eight = writers.plain(random, "b", (8, 32), BF16, codes=E4M3, **WHOLE)
    blocks = writers.mxfp8(random, "c", (8, 64), BF16)
    tensors = four.tensors | eight.tensors | blocks.tensors
    source = opened(tmp_path, tensors, MIXED)
    assert set(source.keys()) == {"a.weight", "b.weight", "c.weight"}
    np.testing.assert_array_equal(source.read("c.weight"), blocks.values)
    np.testing.assert_array_equal(source.read("a.weight"), four.values)
    np.testing.assert_array_equal(source.read("b.weight"), eight.values)


def without(written: Written, part: str) -> dict[str, np.ndarray]:
    return {k: v for k, v in written.tensors.items() if not k.endswith(part)}


@pytest.mark.parametrize(
    "name, part",
    [
        ("gptq", "qzeros"),
        ("gptq", "qweight"),
        ("awq", "scales"),
        ("bitsandbytes int8", ".weight"),
        ("bitsandbytes nf4", "absmax"),
        ("bitsandbytes nf4 of nf4", "nested_absmax"),
        ("int8", ".weight"),
        ("packed int4", "weight_shape"),
        ("packed int4", "weight_scale"),
        ("FBGEMM", ".weight"),
        ("NVFP4", ".weight"),
        ("NVFP4", "weight_scale"),
        ("MXFP8", ".weight"),
        ("torchao Int4Tensor", "w._weight_scale"),
    ],
)
def test_a_weight_without_one_of_its_parts_is_refused(tmp_path, name, part):
    settings, writer, dtype = FORMATS[name]
    written = writer(np.random.default_rng(0), "w", (48, 64), dtype)
    with pytest.raises(ValueError, match=facts("w", part.lstrip("."), str(tmp_path))):
        tensors = without(written, part)
        opened(tmp_path, tensors, settings, dtype, written.metadata)


# Of a part without its last row, what the message says.
SHAPES = [
    ("gptq", "scales", ["(4, 6)", "(3, 6)"]),
    ("gptq", "qzeros", ["(3, 6)", "(4, 6)"]),
    ("awq", "qweight", ["63", "4"]),
    ("bitsandbytes int8", "SCB", ["(47,)", "(48, 64)"]),
    ("bitsandbytes nf4", "absmax", ["(47,)", "(48,)"]),
    ("packed int4", "weight_packed", ["(47, 8)", "(48, 64)"]),
    ("int8", "weight_scale", ["(47, 1)", "(48, 64)"]),
    ("FBGEMM", "weight_scale", ["(47, 1)", "(48, 64)"]),
    ("NVFP4", "weight_scale", ["(47, 4)", "(48, 64)"]),
    ("MXFP8", "weight_scale", ["(47, 2)", "(48, 64)"]),
    ("torchao Int8Tensor", "_scale", ["(47, 4)", "(48, 64)"]),
]


@pytest.mark.parametrize("name, part, match", SHAPES)
def test_a_part_of_another_shape_is_refused(tmp_path, name, part, match):
    settings, writer, dtype = FORMATS[name]
    written = writer(np.random.default_rng(0), "w", (48, 64), dtype)
    (key,) = (key for key in written.tensors if key.endswith(part))
    tensors = written.tensors | {key: written.tensors[key][:-1].copy()}
    with pytest.raises(ValueError, match=facts("(1)", "w", *match)):
        opened(tmp_path, tensors, settings, dtype, written.metadata)


NVFP4 = compressed("nvfp4-pack-quantized", num_bits=4, type="float")
UNDECODED = [
    (GPTQ | {"checkpoint_format": "marlin"}, ["'marlin'", "gptq_v2"]),
    (AWQ | {"version": "gemv_fast"}, ["'gemv_fast'", "gemm"]),
    (MODELOPT | {"quant_algo": "W4A8_AWQ"}, ["'W4A8_AWQ'", "FP8", "NVFP4"]),
    (
        MIXED | {"quantized_layers": {"a": {"quant_algo": "INT4"}}},
        ["'INT4'", "FP8", "NVFP4"],
    ),
    (NVFP4, ["'nvfp4-pack-quantized'", "pack-quantized", "float-quantized"]),
    (
        compressed("pack-quantized") | {"sparsity_config": {"format": "x24"}},
        ["sparsity_config", "'x24'"],
    ),
    (
        compressed("pack-quantized")
        | {"transform_config": {"config_groups": {"a": 1}}},
        ["transform_config"],
    ),
]


@pytest.mark.parametrize("quantization, match", UNDECODED)
def test_a_variant_that_is_not_decoded_is_refused_by_name(quantization, match):
    with pytest.raises(ValueError, match=facts("quantization_config", *match)):
        bridge.from_hf_config(HF_CONFIG | {"quantization_config": quantization})


def test_a_class_of_torchao_that_is_not_decoded_is_refused_by_name(tmp_path):
    random = np.random.default_rng(0)
    written = writers.torchao(random, "w", (8, 16), BF16, kind="Int4TilePacked")
    with pytest.raises(ValueError, match=facts("Int4TilePacked", "Int4Tensor")):
        opened(tmp_path, written.tensors, TORCHAO, BF16, written.metadata)


def test_a_group_beyond_the_last_is_refused(tmp_path):
    written = writers.gptq(np.random.default_rng(0), "w", (16, 32), F16)
    written.tensors["w.g_idx"][3] = 9
    source = opened(tmp_path, written.tensors, GPTQ, F16)
    with pytest.raises(ValueError, match=facts("w.g_idx", 9, 2)):
        source.read("w.weight")
