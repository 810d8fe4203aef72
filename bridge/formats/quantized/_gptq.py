"""GPTQ: integers of 2, 3, 4 or 8 bits, packed along the inputs.

`X.qweight` of shape `(in * bits / 32, out)`, `X.scales` of shape `(groups, out)` and
`X.qzeros`, the zero points of the groups packed along `out`; `X.g_idx` is the group of
each input, which after activation reordering is not `input // group_size`. The format
`gptq` stores a zero point less 1, which `gptq_v2` does not.

Source: AutoGPTQ `nn_modules/qlinear/qlinear_cuda.py`, GPTQModel
`nn_modules/qlinear/__init__.py` and `utils/model.py`.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from bridge._box import Box
from bridge.formats._source import Source
from bridge.formats.quantized._codes import Codes, Packed, Plain
from bridge.formats.quantized._scaled import ScaledWeight
from bridge.formats.quantized._weight import Found, Settings

FORMATS = {"gptq": 1, "gptq_v2": 0}
"""What is added to the zero points that a format stores."""

_BITS = (2, 3, 4, 8)
_PARTS = ("qweight", "qzeros", "scales")


@dataclasses.dataclass(frozen=True)
class _LessOne:
    """Matrix of zero points that are stored less 1, each modulo the codes.

    Args:
      stored: What is stored, of which the largest code stands for 0.
    """

    stored: Packed

    @property
    def name(self) -> str:
        """Name of the stored tensor."""
        return self.stored.name

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads the region of a box."""
        mask = np.uint8((1 << self.stored.bits) - 1)
        return (self.stored.read(source, box) + np.uint8(1)) & mask


def _zero_points(name: str, bits: int, settings: Settings) -> Codes:
    """Returns the zero points, packed along the outputs.

    GPTQModel subtracts 1 from all codes of an integer at once, so that a 0 borrows from
    the code behind it, and adds it again when it reads; others do so code by code.
    """
    stored = Packed(name, bits, dim=1)
    if not FORMATS[checkpoint_format(settings)]:
        return stored
    meta = settings.get("meta")
    written_by = meta.get("quantizer") if isinstance(meta, Mapping) else None
    if "gptqmodel" not in str(written_by).lower() or 32 % bits:
        return _LessOne(stored)
    ones = sum(1 << at for at in range(0, 32, bits))
    return dataclasses.replace(stored, added=ones)


def checkpoint_format(settings: Settings) -> str:
    """Returns the name of the packing that settings of `gptq` or `awq` say."""
    named = (settings.get(name) for name in ("checkpoint_format", "version", "format"))
    default = "gemm" if settings.get("quant_method") == "awq" else "gptq"
    return str(next((name for name in named if name is not None), default)).lower()


def find_gptq(source: Source, settings: Settings, dtype: np.dtype) -> Found:
    """Finds the GPTQ weights of a checkpoint; reads headers only.

    Args:
      source: Checkpoint.
      settings: `quantization_config`; `checkpoint_format` says how zero points are
        stored, `bits` how wide codes are where no `g_idx` gives the number of inputs.
      dtype: Dtype of the decoded weights.

    Returns:
      Weights `X.weight`, and error messages by tensor name.
    """
    keys = set(source.keys())
    weights: dict[str, ScaledWeight] = {}
    names, wrong = packed_modules(source)
    for name in names:
        groups = f"{name}.g_idx" if f"{name}.g_idx" in keys else None
        try:
            bits, inputs = _sizes(source, name, groups, settings)
            block = _group_size(source, name, bits, inputs, groups is not None)
        except ValueError as error:
            wrong[name] = str(error)
            continue
        weights[f"{name}.weight"] = ScaledWeight(
            shape=(source.shape(f"{name}.scales")[1], inputs),
            dtype=dtype,
            codes=Packed(f"{name}.qweight", bits, dim=0),
            scales=Plain(f"{name}.scales"),
            block=(block, 1),
            zeros=_zero_points(f"{name}.qzeros", bits, settings),
            groups=groups,
            transposed=True,
        )
    return Found(weights, wrong)


def packed_modules(source: Source) -> tuple[list[str], dict[str, str]]:
    """Finds the modules that have tensors of GPTQ or AWQ.

    Args:
      source: Checkpoint.

    Returns:
      Names of the modules that have all parts, and error messages of the others.
    """
    keys = set(source.keys())
    modules = dict.fromkeys(
        key.removesuffix(f".{part}")
        for part in (*_PARTS, "g_idx")
        for key in source.keys()
        if key.endswith(f".{part}")
    )
    wrong = {
        name: f"there is no {', '.join(missing)} of it"
        for name in modules
        if (missing := [part for part in _PARTS if f"{name}.{part}" not in keys])
    }
    return [name for name in modules if name not in wrong], wrong


def check_shapes(
    source: Source, name: str, expected: dict[str, tuple[int, ...]]
) -> None:
    """Checks shapes and dtypes of a module's tensors.

    Args:
      source: Checkpoint.
      name: Name of the module.
      expected: Shapes by the tensor's last name; all but `scales` are int32.

    Raises:
      ValueError: If a tensor has another shape or dtype.
    """
    for part, shape in expected.items():
        found, dtype = source.shape(f"{name}.{part}"), source.dtype(f"{name}.{part}")
        if found != shape:
            raise ValueError(f"{part} is {found}, the others say {shape}")
        is_float = dtype.name in ("float16", "bfloat16", "float32")
        if is_float != (part == "scales") or not (is_float or dtype == np.int32):
            raise ValueError(f"{part} of {dtype} is not decoded")


def _sizes(
    source: Source, name: str, groups: str | None, settings: Settings
) -> tuple[int, int]:
    """Returns bits per code, and the number of inputs."""
    stored = 32 * source.shape(f"{name}.qweight")[0]
    if groups is not None:
        inputs = source.shape(groups)[0]
        bits = stored // inputs if inputs else 0
    else:
        bits = settings.get("bits")
        inputs = stored // bits if type(bits) is int and bits else 0
    if bits not in _BITS or bits * inputs != stored:
        raise ValueError(f"qweight has {stored} bits for {inputs} inputs")
    return bits, inputs


def _group_size(
    source: Source, name: str, bits: int, inputs: int, indexed: bool
) -> int:
    if len(source.shape(f"{name}.scales")) != 2:
        raise ValueError("scales are not a matrix of groups and outputs")
    groups, out = source.shape(f"{name}.scales")
    expected: dict[str, tuple[int, ...]] = {
        "qweight": (inputs * bits // 32, out),
        "qzeros": (groups, out * bits // 32),
        "scales": (groups, out),
    }
    if indexed:
        expected["g_idx"] = (inputs,)
    check_shapes(source, name, expected)
    if not groups or not inputs:
        raise ValueError(f"{groups} groups of {inputs} inputs")
    return -(-inputs // groups)
