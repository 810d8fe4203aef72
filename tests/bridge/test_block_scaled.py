"""Block-scaled checkpoints read as the bfloat16 they stand for, box by box."""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from bridge_helpers import (
    assert_same_bytes,
    like_of,
    random_tensors,
    tensors_of,
    write_llama,
)
from helpers.errors import facts
from hypothesis import given, settings
from hypothesis import strategies as st

import bridge
from bridge._tree import named_leaves
from bridge.formats._safetensors import encode_header
from bridge.formats.quantized._decode import decode_quantized
from bridge.hf._config import find_family
from bridge.streaming._load import load

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [2, 4]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
RNG = np.random.default_rng(0)


def write(file: Path, tensors: dict[str, np.ndarray]) -> Path:
    entries = {key: (array.shape, array.dtype) for key, array in tensors.items()}
    data = b"".join(array.tobytes() for array in tensors.values())
    file.write_bytes(encode_header(entries) + data)
    return file


def opened(file: Path, tensors: dict[str, np.ndarray]) -> bridge.Source:
    return bridge.open_checkpoint(write(file, tensors))


def fp8_tensors(shape: tuple[int, ...], block: tuple[int, int] = (2, 4)):
    """Any numbers and scales, and the product by the definition, one by one."""
    grid = *shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1])
    weight = RNG.normal(size=shape).astype(E4M3)
    scales = RNG.uniform(0.01, 2, size=grid).astype(np.float32)
    expected = np.empty(shape, BF16)
    for *matrix, i, j in np.ndindex(shape):
        scale = scales[(*matrix, i // block[0], j // block[1])]
        expected[(*matrix, i, j)] = np.float32(weight[(*matrix, i, j)]) * scale
    return {"w.weight": weight, "w.weight_scale_inv": scales}, expected


def mxfp4_tensors(num_experts: int, num_in: int, num_out: int):
    blocks = RNG.integers(0, 256, (num_experts, num_out, num_in // 32, 16), np.uint8)
    scales = RNG.integers(110, 140, blocks.shape[:-1], np.uint8)
    return {"up_proj_blocks": blocks, "up_proj_scales": scales}


# An expert's numbers 0, 0.5, ... 6, negatives behind: what the 16 codes stand for.
CODES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def test_mxfp4_is_what_its_definition_says(tmp_path):
    codes = RNG.integers(0, 16, (2, 3, 64))  # experts, out, in
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    scales = RNG.integers(100, 150, (2, 3, 2), np.uint8)
    tensors = {"x_blocks": blocks.reshape(2, 3, 2, 16), "x_scales": scales}
    source = decode_quantized(opened(tmp_path / "a.safetensors", tensors), MXFP4)
    assert (source.keys(), source.shape("x")) == (("x",), (2, 64, 3))
    read = source.read("x")
    assert (read.dtype, source.dtype("x")) == (BF16, BF16)
    for expert, out, i in np.ndindex(2, 3, 64):
        scale = 2.0 ** (int(scales[expert, out, i // 32]) - 127)
        assert read[expert, i, out] == CODES[codes[expert, out, i]] * scale


def test_the_scale_that_is_no_number_makes_none(tmp_path):
    tensors = {
        "x_blocks": np.full((1, 1, 1, 16), 0x21, np.uint8),
        "x_scales": np.full((1, 1, 1), 255, np.uint8),
    }
    source = decode_quantized(opened(tmp_path / "a.safetensors", tensors), MXFP4)
    assert np.isnan(source.read("x").astype(np.float32)).all()


SHAPES = [(4, 8), (5, 9), (1, 1), (7, 3), (3, 5, 6), (2, 1, 3, 7), (0, 8), (4, 0)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, BF16, E8M0])
def test_fp8_is_number_times_scale_of_its_block(tmp_path, shape, dtype):
    tensors, expected = fp8_tensors(shape)
    scales = np.exp2(RNG.integers(-9, 3, tensors["w.weight_scale_inv"].shape))
    exact = tensors["w.weight_scale_inv"] if dtype == np.float32 else scales
    if dtype != np.float32:
        tensors["w.weight_scale_inv"] = exact.astype(dtype)
        grown = exact.repeat(2, -2)[..., : shape[-2], :].repeat(4, -1)
        grown = grown[..., : shape[-1]]
        expected = (tensors["w.weight"].astype(np.float32) * grown).astype(BF16)
    tensors["norm.weight"] = np.ones(3, np.float32)
    source = decode_quantized(opened(tmp_path / "a.safetensors", tensors), FP8)
    assert source.keys() == ("w.weight", "norm.weight")
    assert (source.shape("w.weight"), source.dtype("w.weight")) == (shape, BF16)
    assert source.dtype("norm.weight") == np.float32
    assert_same_bytes({"w": source.read("w.weight")}, {"w": expected})
    np.testing.assert_array_equal(source.read("norm.weight"), tensors["norm.weight"])


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[tuple[bridge.Source, str]]:
    directory = tmp_path_factory.mktemp("boxes")
    fp8 = opened(directory / "a.safetensors", fp8_tensors((3, 7, 13))[0])
    mxfp4 = opened(directory / "b.safetensors", mxfp4_tensors(3, 96, 5))
    return [
        (decode_quantized(fp8, FP8), "w.weight"),
        (decode_quantized(mxfp4, MXFP4), "up_proj"),
    ]


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 1), st.data())
def test_a_box_is_a_slice_of_the_whole(sources, number, data):
    source, key = sources[number]
    ends = [st.tuples(st.integers(-1, n), st.integers(0, n)) for n in source.shape(key)]
    index = tuple(slice(*data.draw(e)) for e in ends[: data.draw(st.integers(0, 3))])
    box, expected = source.read(key, index), source.read(key)[index]
    assert (box.shape, box.dtype) == (expected.shape, BF16)
    assert box.tobytes() == expected.tobytes()


def test_a_box_reads_the_numbers_and_scales_it_needs(tmp_path, bytes_read):
    tensors, _ = fp8_tensors((64, 40))
    source = decode_quantized(opened(tmp_path / "a.safetensors", tensors), FP8)
    bytes_read.clear()
    source.read("w.weight", (slice(10, 13),))
    assert sum(bytes_read) == 3 * 40 + 2 * 10 * 4  # rows 10 to 12; blocks 5 and 6
    experts = opened(tmp_path / "b.safetensors", mxfp4_tensors(8, 96, 10))
    source = decode_quantized(experts, MXFP4)
    bytes_read.clear()
    source.read("up_proj", (slice(3, 5), slice(None), slice(2, 6)))
    assert sum(bytes_read) == 2 * 4 * (3 * 16 + 3)  # 2 experts, 4 rows, 3 blocks each


def test_a_slice_with_a_step_is_refused(sources):
    with pytest.raises(ValueError, match=facts("(slice(0, 2, 2),)", "(3, 7, 13)")):
        sources[0][0].read("w.weight", (slice(0, 2, 2),))


def test_numbers_and_scales_may_lie_in_different_files(tmp_path):
    tensors, expected = fp8_tensors((5, 9))
    weight_map = {key: f"{i}.safetensors" for i, key in enumerate(tensors)}
    for key, file in weight_map.items():
        write(tmp_path / file, {key: tensors[key]})
    index = json.dumps({"weight_map": weight_map})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    source = decode_quantized(bridge.open_checkpoint(tmp_path), FP8)
    np.testing.assert_array_equal(source.read("w.weight"), expected)


@pytest.mark.parametrize("quantization", [None, FP8, MXFP4])
def test_what_is_not_block_scaled_is_passed_through(tmp_path, quantization):
    file = write(tmp_path / "a.safetensors", {"w": np.ones((2, 2), np.float32)})
    source = bridge.open_checkpoint(file)
    assert decode_quantized(source, quantization) is source


ONES = np.ones((4, 8), E4M3)
GRID = np.ones((2, 2), np.float32)
BLOCKS, SCALES = np.zeros((2, 3, 1, 16), np.uint8), np.zeros((2, 3, 1), np.uint8)
WRONG = {
    "no scales": (FP8, {"w": ONES}, ["w", "w_scale_inv"]),
    "no weight": (FP8, {"w_scale_inv": GRID}, ["w_scale_inv", "fp8", "w"]),
    "scales of a weight that is not fp8": (
        FP8,
        {"w": np.ones((4, 8), BF16), "w_scale_inv": GRID},
        ["w_scale_inv", "fp8", "w"],
    ),
    "scales of another grid": (
        FP8,
        {"w": ONES, "w_scale_inv": GRID[:1]},
        ["w_scale_inv", "(1, 2)", "(4, 8)", "(2, 2)", "(2, 4)"],
    ),
    "integer scales": (
        FP8,
        {"w": ONES, "w_scale_inv": GRID.astype(np.uint8)},
        ["w_scale_inv", "uint8"],
    ),
    "one dim": (FP8, {"w": ONES[0], "w_scale_inv": GRID}, ["w_scale_inv", "(8,)"]),
    "E5M2": (FP8, {"w": ONES.astype(E5M2)}, ["config.json", "(1)", "w"]),
    "mxfp4 in an fp8 checkpoint": (
        FP8,
        {"x_blocks": BLOCKS, "x_scales": SCALES},
        ["config.json", "(2)", "x_blocks", "x_scales"],
    ),
    "fp8 in an mxfp4 checkpoint": (MXFP4, {"w": ONES}, ["config.json", "(1)", "w"]),
    "fp8 without a word in the config": (
        None,
        {"w": ONES, "w_scale_inv": GRID},
        ["config.json", "(2)", "w", "w_scale_inv"],
    ),
    "mxfp4 without a word": (
        None,
        {"x_blocks": BLOCKS, "x_scales": SCALES},
        ["config.json", "(2)", "x_blocks", "x_scales"],
    ),
    "blocks alone": (MXFP4, {"x_blocks": BLOCKS}, ["x_blocks", "_blocks", "_scales"]),
    "scales alone": (MXFP4, {"x_scales": SCALES}, ["x_scales", "_blocks", "_scales"]),
    "blocks of 8": (
        MXFP4,
        {"x_blocks": BLOCKS[..., :8], "x_scales": SCALES},
        ["x_blocks", "(2, 3, 1, 8)", "(experts, out, blocks, 16)"],
    ),
    "scales of other experts": (
        MXFP4,
        {"x_blocks": BLOCKS, "x_scales": SCALES[:1]},
        ["x_blocks", "(2, 3, 1, 16)", "(1, 3, 1)"],
    ),
    "signed blocks": (
        MXFP4,
        {"x_blocks": BLOCKS.view(np.int8), "x_scales": SCALES},
        ["x_blocks", "int8", "uint8"],
    ),
    "a name that is taken": (
        MXFP4,
        {"x": ONES.astype(BF16), "x_blocks": BLOCKS, "x_scales": SCALES},
        ["x", "(1)"],
    ),
}


@pytest.mark.parametrize("quantization, tensors, match", WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(tmp_path, quantization, tensors, match):
    source = opened(tmp_path / "a.safetensors", tensors)
    with pytest.raises(ValueError, match=facts(*match)) as error:
        decode_quantized(source, quantization)
    assert str(tmp_path) in str(error.value)


def test_all_that_does_not_fit_is_listed_at_once(tmp_path):
    tensors = {"a": ONES, "b_scale_inv": GRID, "c": ONES.astype(E5M2)}
    source = opened(tmp_path / "a.safetensors", tensors)
    with pytest.raises(
        ValueError,
        match=facts("b_scale_inv", "b", "a_scale_inv", "a", "c", "(2)", "(1)"),
    ):
        decode_quantized(source, FP8)


@pytest.mark.parametrize(
    "quantization, match",
    [
        *(
            ({"quant_method": name}, ["quant_method", f"'{name}'", "gptq", "awq"])
            for name in ("nvfp4", "hqq", "quanto", "auto-round", "bitnet")
        ),
        ({"bits": 4}, ["quant_method None"]),
        ({"quant_method": ["fp8"]}, ["quant_method ['fp8']"]),
        ("fp8", ["quantization_config = 'fp8'"]),
        (FP8 | {"weight_block_size": [128]}, ["weight_block_size = [128]"]),
        (FP8 | {"weight_block_size": [0, 4]}, ["weight_block_size = [0, 4]"]),
        (FP8 | {"weight_block_size": [True, 4]}, ["weight_block_size = [True, 4]"]),
        (FP8 | {"weight_block_size": ["2", 4]}, ["weight_block_size = ['2', 4]"]),
    ],
)
def test_another_way_to_quantise_is_refused_by_name(tmp_path, quantization, match):
    source = opened(tmp_path / "a.safetensors", {"w": np.ones(2, np.float32)})
    with pytest.raises(ValueError, match=facts(*match)):
        decode_quantized(source, quantization)


def test_a_block_scaled_llama_is_exported_as_the_bfloat16_it_was_read_as(tmp_path):
    tensors = random_tensors(BF16)
    for key, array in random_tensors(np.float32).items():
        if "_proj" in key:
            blocks = -(-array.shape[0] // 32), -(-array.shape[1] // 32)
            tensors[key] = array.astype(E4M3)
            tensors[key + "_scale_inv"] = RNG.uniform(0.1, 2, blocks).astype("f4")
    fp8 = FP8 | {"weight_block_size": [32, 32]}
    source = decode_quantized(opened(tmp_path / "a.safetensors", tensors), fp8)
    config = bridge.from_hf_config(write_llama(tmp_path / "llama"))
    mapping = find_family("llama").mapping(config)
    params = load(source, mapping, like_of(config, jnp.bfloat16))
    bridge.save_hf(tmp_path / "saved", params, config)
    expected = {key: source.read(key) for key in source.keys()}
    assert_same_bytes(tensors_of(tmp_path / "saved"), expected)


def test_an_import_decodes_what_its_config_says(tmp_path):
    tensors = random_tensors(BF16)
    key = "model.layers.1.mlp.up_proj.weight"
    tensors[key] = tensors[key].astype(E4M3)
    tensors[key + "_scale_inv"] = RNG.uniform(0.1, 2, (3, 2)).astype("f4")
    fp8 = FP8 | {"weight_block_size": [32, 32]}
    path = write_llama(tmp_path, quantization_config=fp8)
    write(path / "model.safetensors", tensors)
    params = bridge.load_hf(path, like_of(bridge.from_hf_config(path), jnp.bfloat16))
    decoded = decode_quantized(bridge.open_checkpoint(path), fp8).read(key)
    kernel = named_leaves(params)["layers.mlp.up_proj.kernel"]
    np.testing.assert_array_equal(kernel[1], decoded.T)
    assert str(bridge.plan(path)).count("bfloat16") == 12
