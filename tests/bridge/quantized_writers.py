"""Tiny quantized weights, each with the numbers it stands for by the definition.

Written from the formats' descriptions and apart from the decoders: codes are packed as
one large integer a line, and each number is computed alone.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
INT8, UINT8 = np.dtype(np.int8), np.dtype(np.uint8)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
# The 16 values of NormalFloat4: quantiles of a normal distribution.
# Source: QLoRA (arXiv 2305.14314), appendix E.
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453]
    + [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0]
    + [0.07958029955625534, 0.16093020141124725, 0.24611230194568634]
    + [0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
    + [0.7229568362236023, 1.0],
    np.float32,
)


@dataclasses.dataclass(frozen=True)
class Written:
    """Tensors of one weight `NAME.weight`, and what they stand for.

    Attributes:
      tensors: Stored tensors by name.
      values: The weight `(out, in)`.
      metadata: Texts for the file's header.
    """

    tensors: dict[str, np.ndarray]
    values: np.ndarray
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)


Writer = Callable[..., Written]


def pack(
    codes: np.ndarray, bits: int, dim: int, *, word: int = 32, order: Sequence[int] = ()
) -> np.ndarray:
    """Packs codes along a dim: each line is one integer, cut into words."""
    if dim == 0:
        return pack(codes.T, bits, 1, word=word, order=order).T.copy()
    rows, mask = [], (1 << bits) - 1
    for line in codes.tolist():
        order = order or range(len(line))
        stream = 0
        for place, code in enumerate(line):
            unit, inside = divmod(place, len(order))
            stream |= (code & mask) << bits * (unit * len(order) + order[inside])
        words = -(-len(line) * bits // word)
        rows.append([stream >> word * i & (1 << word) - 1 for i in range(words)])
    return np.array(rows, f"u{word // 8}").view(f"i{word // 8}")


def rounded(shape, value: Callable[[int, int], np.float32], dtype) -> np.ndarray:
    """Each number alone, in float32, rounded once."""
    values = np.empty(shape, dtype)
    for out, i in np.ndindex(shape):
        values[out, i] = value(out, i)
    return values


def gptq(
    random,
    name,
    shape,
    dtype,
    *,
    bits=4,
    group=16,
    v2=False,
    shuffled=False,
    borrows=False,
) -> Written:
    """GPTQ, its groups in order or shuffled by activation reordering.

    With `borrows` 1 is subtracted from the zero points of an integer at once.
    """
    out, inputs = shape
    count = -(-inputs // group)
    codes = random.integers(0, 1 << bits, (inputs, out))
    # The first format stores 0 less 1, which is the largest code.
    zeros = random.integers(0, 1 << bits, (count, out))
    zeros[0, :2] = 0, (1 << bits) - 1
    scales = random.uniform(0.01, 0.1, (count, out)).astype(np.float16)
    groups = (np.arange(inputs) // group).astype(np.int32)
    if shuffled:
        groups = random.permutation(groups)
    stored = pack((zeros - (not v2 and not borrows)) % (1 << bits), bits, 1)
    if borrows:
        ones = np.uint32(sum(1 << at for at in range(0, 32, bits)))
        stored = (stored.view(np.uint32) - ones).view(stored.dtype)
    tensors = {
        f"{name}.qweight": pack(codes, bits, 0),
        f"{name}.qzeros": stored,
        f"{name}.scales": scales,
        f"{name}.g_idx": groups,
    }

    def value(o: int, i: int) -> np.float32:
        group = groups[i]
        return np.float32(codes[i, o] - zeros[group, o]) * np.float32(scales[group, o])

    return Written(tensors, rounded(shape, value, dtype))


def awq(random, name, shape, dtype, *, group=16) -> Written:
    """AWQ of the version gemm."""
    out, inputs = shape
    codes = random.integers(0, 16, (inputs, out))
    zeros = random.integers(0, 16, (inputs // group, out))
    scales = random.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
    # Outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight are the nibbles from the lowest on.
    places = [[0, 2, 4, 6, 1, 3, 5, 7].index(i) for i in range(8)]
    tensors = {
        f"{name}.qweight": pack(codes, 4, 1, order=places),
        f"{name}.qzeros": pack(zeros, 4, 1, order=places),
        f"{name}.scales": scales,
    }

    def value(o: int, i: int) -> np.float32:
        zero, scale = zeros[i // group, o], scales[i // group, o]
        return np.float32(codes[i, o] - zero) * np.float32(scale)

    return Written(tensors, rounded(shape, value, dtype))


def bnb_int8(random, name, shape, dtype) -> Written:
    """bitsandbytes with the largest magnitude of each row."""
    codes = random.integers(-127, 128, shape).astype(np.int8)
    largest = random.uniform(0.1, 3, shape[0]).astype(np.float32)
    tensors = {
        f"{name}.weight": codes,
        f"{name}.SCB": largest,
        f"{name}.weight_format": np.array(0, np.uint8),
    }
    factor = np.float32(7.874015718698502e-3)  # that of bitsandbytes, for 1 / 127

    def value(o: int, i: int) -> np.float32:
        return np.float32(codes[o, i]) * largest[o] * factor

    return Written(tensors, rounded(shape, value, dtype))


def bnb_4bit(
    random, name, shape, dtype, *, nested=False, storage: np.dtype = UINT8, block=64
) -> Written:
    """bitsandbytes of 4 bits, its scales quantized or not."""
    size = shape[0] * shape[1]
    codes = random.integers(0, 16, size + size % 2)
    pairs = (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)
    blocks = -(-size // block)
    scales = random.uniform(0.1, 2, blocks).astype(np.float32)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16"}
    state |= {"shape": [*shape]}
    tensors = {
        f"{name}.weight": pairs.view(storage)[:, None],
        f"{name}.weight.absmax": scales,
        f"{name}.weight.quant_map": NF4,
    }
    if nested:
        table = np.sort(random.uniform(-1, 1, 256)).astype(np.float32)
        small = random.integers(0, 256, blocks).astype(np.uint8)
        of_blocks = random.uniform(0.1, 1, -(-blocks // 2)).astype(np.float32)
        state |= {"nested_blocksize": 2, "nested_dtype": "float32"}
        state |= {"nested_offset": 0.7318}
        tensors |= {
            f"{name}.weight.absmax": small,
            f"{name}.weight.nested_absmax": of_blocks,
            f"{name}.weight.nested_quant_map": table,
        }
        offset = np.float32(0.7318)
        scales = [table[small[i]] * of_blocks[i // 2] + offset for i in range(blocks)]
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors[f"{name}.weight.quant_state.bitsandbytes__nf4"] = text

    def value(o: int, i: int) -> np.float32:
        place = o * shape[1] + i
        return NF4[codes[place]] * scales[place // block]

    return Written(tensors, rounded(shape, value, dtype))


def plain(
    random,
    name,
    shape,
    dtype,
    *,
    codes: np.dtype = INT8,
    grid: Callable[..., tuple[int, ...]],
    block: tuple[int, int],
    scale="weight_scale",
    scale_dtype=np.float32,
    asymmetric=False,
) -> Written:
    """Int8 or fp8 with scales of blocks, as many formats store them."""
    numbers = (
        random.integers(-128, 128, shape).astype(np.int8)
        if codes == INT8
        else random.normal(size=shape, scale=20).astype(codes)
    )
    scales = random.uniform(0.01, 0.1, grid(*shape)).astype(scale_dtype)
    tensors = {f"{name}.weight": numbers, f"{name}.{scale}": scales}
    zeros = np.zeros(scales.shape, np.int8)
    if asymmetric:
        zeros = random.integers(-128, 128, scales.shape).astype(np.int8)
        tensors[f"{name}.weight_zero_point"] = zeros

    def value(o: int, i: int) -> np.float32:
        at = (o // block[0], i // block[1])[: scales.ndim] if scales.size > 1 else ...
        number = np.float32(numbers[o, i]) - np.float32(zeros[at]).item()
        return np.float32(number) * np.float32(scales[at].item())

    return Written(tensors, rounded(shape, value, dtype))


# The eight magnitudes of a float of four bits: one of sign, two of exponent.
# Source: OCP Microscaling Formats (MX) v1.0, section 5.3.3.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nvfp4(random, name, shape, dtype) -> Written:
    """Model Optimizer's NVFP4: scales of 16 inputs, which one number scales."""
    codes = random.integers(0, 16, shape)
    scales = random.uniform(1, 400, (shape[0], shape[1] // 16)).astype(E4M3)
    factor = np.float32(random.uniform(1e-4, 1e-3))
    tensors = {
        f"{name}.weight": pack(codes, 4, 1, word=8).view(np.uint8),
        f"{name}.weight_scale": scales,
        f"{name}.weight_scale_2": np.array(factor),
    }

    def value(o: int, i: int) -> np.float32:
        sign, size = divmod(int(codes[o, i]), 8)
        scale = np.float32(scales[o, i // 16]) * factor
        return np.float32(-E2M1[size] if sign else E2M1[size]) * scale

    return Written(tensors, rounded(shape, value, dtype))


def mxfp8(random, name, shape, dtype) -> Written:
    """Model Optimizer's MXFP8: a power of two scales 32 inputs, the last ones fewer."""
    codes = random.uniform(-4, 4, shape).astype(E4M3)
    powers = random.integers(110, 130, (shape[0], -(-shape[1] // 32))).astype(np.uint8)
    tensors = {f"{name}.weight": codes, f"{name}.weight_scale": powers}

    def value(o: int, i: int) -> np.float32:
        return np.float32(codes[o, i]) * np.float32(
            2.0 ** (int(powers[o, i // 32]) - 127)
        )

    return Written(tensors, rounded(shape, value, dtype))


def packed(
    random, name, shape, dtype, *, bits=4, group=16, asymmetric=False, shuffled=False
) -> Written:
    """compressed-tensors, packed."""
    half = 1 << (bits - 1)
    codes = random.integers(-half, half, shape)
    count = -(-shape[1] // group)
    scales = random.uniform(0.01, 0.1, (shape[0], count)).astype(BF16)
    zeros = np.zeros(scales.shape, np.int64)
    groups = np.arange(shape[1], dtype=np.int32) // group
    tensors = {
        f"{name}.weight_packed": pack(codes + half, bits, 1),
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": np.array(shape),
    }
    if asymmetric:
        zeros = random.integers(-half, half, scales.shape)
        tensors[f"{name}.weight_zero_point"] = pack(zeros + half, bits, 0)
    if shuffled:
        groups = random.permutation(groups)
        tensors[f"{name}.weight_g_idx"] = groups

    def value(o: int, i: int) -> np.float32:
        at = o, groups[i]
        return np.float32(codes[o, i] - zeros[at]) * np.float32(scales[at])

    return Written(tensors, rounded(shape, value, dtype))


def torchao(random, name, shape, dtype, *, kind: str, group=16) -> Written:
    """torchao's tensors, taken apart."""
    grid = shape[0], shape[1] // group
    scales = random.uniform(0.01, 0.1, grid).astype(BF16)
    names = ["qdata", "scale"]
    zeros = np.zeros(grid, np.float32)
    stored: dict[str, np.ndarray] = {"scale": scales}
    if kind == "Float8Tensor":
        codes = random.normal(size=shape, scale=20).astype(E4M3)
    else:
        half = 8 if kind == "Int4Tensor" else 128
        codes = random.integers(-half, half, shape).astype(np.int8)
    stored["qdata"] = codes
    if kind == "IntxUnpackedToInt8Tensor":
        stored["zero_point"] = random.integers(-8, 8, grid).astype(np.int8)
        zeros = stored["zero_point"].astype(np.float32)
    if kind == "Int4Tensor":
        zeros = random.uniform(-1, 1, grid).astype(BF16)
        stored["qdata"] = pack(codes.astype(np.int64), 4, 1, word=8)
        stored |= {"scale": scales.T.copy(), "zero_point": zeros.T.copy()}
    names += ["zero_point"] * ("zero_point" in stored)
    said = {"_type": kind, "_data": {}, "_tensor_data_names": names}
    metadata = {f"{name}.weight": json.dumps(said)}

    def value(o: int, i: int) -> np.float32:
        code, at = np.float32(codes[o, i]), (o, i // group)
        scale, zero = np.float32(scales[at]), np.float32(zeros[at])
        return code * scale + zero if kind == "Int4Tensor" else (code - zero) * scale

    tensors = {f"{name}._weight_{part}": array for part, array in stored.items()}
    return Written(tensors, rounded(shape, value, dtype), metadata)
