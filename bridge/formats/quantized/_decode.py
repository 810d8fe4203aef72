"""Quantized checkpoints, presented as plain tensors that are decoded when read.

Decoding multiplies, so it is not bit-exactly invertible: it belongs to the source, not
to the rules. An export writes the decoded weights.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from bridge._box import complete
from bridge._report import format_report
from bridge.formats._safetensors import DTYPES
from bridge.formats._source import Source
from bridge.formats.quantized import _compressed_tensors, _gptq
from bridge.formats.quantized._awq import VERSIONS, find_awq
from bridge.formats.quantized._bitsandbytes import find_bitsandbytes
from bridge.formats.quantized._compressed_tensors import find_compressed_tensors
from bridge.formats.quantized._fp8 import find_fp8
from bridge.formats.quantized._fp8_scale import find_fp8_scale
from bridge.formats.quantized._gptq import checkpoint_format, find_gptq
from bridge.formats.quantized._mxfp4 import find_mxfp4
from bridge.formats.quantized._mxfp8 import find_mxfp8
from bridge.formats.quantized._nvfp4 import find_nvfp4, unmodelled_algorithms
from bridge.formats.quantized._recent import Recent
from bridge.formats.quantized._torchao import find_torchao
from bridge.formats.quantized._weight import Found, QuantizedWeight, Settings

DECODED = (
    *("awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq"),
    *("modelopt", "mxfp4", "torchao"),
)
"""Quantization methods that are decoded."""

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FP8 = {DTYPES[name] for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0")}

# What a method does besides storing weights in fewer bits.
_REASONS = {
    "bitnet": "; its products round weights and activations as well, which is not "
    "modelled: without quantization_config, weights in bfloat16 are read as plain ones"
}


def undecoded(quantization: Any) -> list[str]:
    """Returns what a `quantization_config` says that is not decoded.

    Args:
      quantization: `quantization_config` of a `config.json`, or None if absent.

    Returns:
      Error messages; none if the checkpoint can be decoded, or is not quantized.
    """
    if not quantization:
        return []
    if not isinstance(quantization, Mapping):
        return [f"quantization_config = {quantization!r} is not an object"]
    method = _method(quantization)
    if method not in DECODED:
        return [
            f"quantization_config has quant_method {method!r}: only "
            f"{', '.join(DECODED)} are decoded{_REASONS.get(str(method), '')}"
        ]
    return [f"quantization_config: {line}" for line in _unmodelled(quantization)]


def decode_quantized(
    source: Source,
    quantization: Settings | None,
    dtype: np.dtype = _BFLOAT16,
) -> Source:
    """Presents the weights of a quantized checkpoint as plain tensors.

    Weights are decoded box by box, so that reading a shard costs only its own bytes;
    the tensors that they are stored as are hidden. Reads headers, and the few bytes
    that some formats say a weight's shape in.

    Args:
      source: Checkpoint to decode.
      quantization: `quantization_config` of its `config.json`, or None if absent.
      dtype: Dtype of the decoded weights, that of the model. Fp8 in blocks and mxfp4
        are bfloat16 whatever it is.

    Returns:
      Decoded checkpoint; `source` itself if nothing in it is quantized.

    Raises:
      ValueError: If the weights are quantized by another method, a weight has no
        scales or scales no weight, or their shapes and dtypes are inconsistent. All
        are listed.
    """
    if quantization is not None and (lines := undecoded(quantization)):
        raise ValueError(
            f"'{source.name}' is quantized: {'; '.join(lines)}. Take the model's "
            "original weights, or dequantize these with transformers and save them."
        )
    found = _find(source, quantization, dtype) if quantization else Found({})
    parts = {part for weight in found.weights.values() for part in weight.parts}
    parts |= set(found.unused)
    others = [k for k in source.keys() if k not in parts and k not in found.wrong]
    report = {
        "that cannot be decoded": [f"{key}: {why}" for key, why in found.wrong.items()],
        "that look block-scaled, though config.json does not say so": [
            key for key in others if _looks_block_scaled(key, source.dtype(key))
        ],
        "of the name that a decoded one takes": [
            key for key in others if key in found.weights
        ],
    }
    if any(report.values()):
        raise ValueError(f"'{source.name}' has tensors\n{format_report(report)}")
    if not parts:
        return source
    _warn_of_unused(source, found.unused)
    hidden = frozenset(found.unused)
    weights = MappingProxyType(dict(found.weights))
    return _DecodedSource(source, weights, hidden, Recent(source))


@dataclasses.dataclass(frozen=True)
class _DecodedSource:
    """Source in which some tensors are decoded from those of another source."""

    source: Source
    weights: Mapping[str, QuantizedWeight]
    hidden: frozenset[str]
    recent: Recent

    @property
    def name(self) -> str:
        return self.source.name

    def keys(self) -> tuple[str, ...]:
        names = {
            part: name for name, weight in self.weights.items() for part in weight.parts
        }
        keys = (key for key in self.source.keys() if key not in self.hidden)
        return tuple(dict.fromkeys(names.get(key, key) for key in keys))

    def shape(self, key: str) -> tuple[int, ...]:
        if key in self.weights:
            return self.weights[key].shape
        return self.source.shape(key)

    def dtype(self, key: str) -> np.dtype:
        if key in self.weights:
            return self.weights[key].dtype
        return self.source.dtype(key)

    def read(self, key: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        if key not in self.weights:
            return self.source.read(key, slices)
        weight = self.weights[key]
        source = self.recent if weight.scattered else self.source
        return weight.read(source, complete(slices, weight.shape))


def _method(quantization: Settings) -> Any:
    # Model Optimizer's own files name the algorithm and the producer alone.
    if "quant_algo" in quantization:
        return quantization.get("quant_method", "modelopt")
    return quantization.get("quant_method")


def _unmodelled(quantization: Settings) -> list[str]:
    match _method(quantization):
        case "gptq" if (name := checkpoint_format(quantization)) not in _gptq.FORMATS:
            return [f"format {name!r} of gptq: only {', '.join(_gptq.FORMATS)}"]
        case "awq" if (name := checkpoint_format(quantization)) not in VERSIONS:
            return [f"version {name!r} of awq: only {', '.join(VERSIONS)}"]
        case "modelopt":
            return unmodelled_algorithms(quantization)
        case "compressed-tensors":
            return _compressed_tensors.undecoded(quantization)
    return []


def _find(source: Source, quantization: Settings, dtype: np.dtype) -> Found:
    match _method(quantization):
        case "fp8" if quantization.get("weight_block_size") is not None:
            return find_fp8(source, quantization, _BFLOAT16)
        case "mxfp4":
            return find_mxfp4(source, quantization, _BFLOAT16)
        case "gptq":
            return find_gptq(source, quantization, dtype)
        case "awq":
            return find_awq(source, quantization, dtype)
        case "bitsandbytes":
            return find_bitsandbytes(source, quantization, dtype)
        case "compressed-tensors":
            return find_compressed_tensors(source, quantization, dtype)
        case "torchao":
            return find_torchao(source, quantization, dtype)
        case "modelopt":
            return _find_modelopt(source, quantization, dtype)
    return find_fp8_scale(source, quantization, dtype)  # fp8, fbgemm_fp8


def _find_modelopt(source: Source, quantization: Settings, dtype: np.dtype) -> Found:
    """Finds the weights of Model Optimizer: fp8, NVFP4 and MXFP8 side by side."""
    fours = find_nvfp4(source, dtype)
    names = [*fours.weights, *(key.removesuffix("_scale_2") for key in fours.wrong)]
    scales = {f"{name}_scale" for name in names}
    blocks = find_mxfp8(source, dtype, scales)
    scales |= {f"{name}_scale" for name in blocks.weights} | set(blocks.wrong)
    eights = find_fp8_scale(source, quantization, dtype, scales)
    return Found(
        {**eights.weights, **blocks.weights, **fours.weights},
        {**eights.wrong, **blocks.wrong, **fours.wrong},
        eights.unused,
    )


def _warn_of_unused(source: Source, unused: tuple[str, ...]) -> None:
    if unused:
        warnings.warn(
            f"'{source.name}' holds {len(unused)} tensors that quantize activations, "
            f"from '{unused[0]}' on. A decoded model has no use for them: they are "
            "left out.",
            stacklevel=5,
        )


def _looks_block_scaled(key: str, dtype: np.dtype) -> bool:
    packed = dtype == np.uint8 and key.endswith(("_blocks", "_scales"))
    return packed or dtype in _FP8 or key.endswith("_scale_inv")
