"""Block-scaled weights, decoded to bfloat16 when they are read.

Decoding multiplies, so it is not bit-exactly invertible: it belongs to the source, not
to the rules. An export writes the decoded bfloat16 weights.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from bridge._box import Box, complete
from bridge._report import format_report
from bridge.formats._fp8 import find_fp8
from bridge.formats._mxfp4 import find_mxfp4
from bridge.formats._safetensors import DTYPES
from bridge.formats._source import Source


class BlockScaled(Protocol):
    """Quantized weight that is stored as several tensors of a source."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the stored tensors."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded weight."""
        ...

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads a box and decodes it to bfloat16."""
        ...


Found = tuple[Mapping[str, BlockScaled], dict[str, str]]
"""Weights by decoded name, and error messages by tensor name."""

_FP8 = {DTYPES[name] for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0")}


def decode_block_scaled(
    source: Source, quantization: Mapping[str, Any] | None
) -> Source:
    """Presents the weights of a block-scaled checkpoint as plain bfloat16 tensors.

    DeepSeek's fp8 (`X.weight` with `X.weight_scale_inv`) and the mxfp4 of GPT-OSS
    (`X_blocks` with `X_scales`) are decoded box by box, so that reading a shard costs
    only its own bytes; the scales are hidden. Reads headers only.

    Args:
      source: Checkpoint to decode.
      quantization: `quantization_config` of its `config.json`, or None if absent.

    Returns:
      Decoded checkpoint; `source` itself if nothing in it is block-scaled.

    Raises:
      ValueError: If the weights are quantized by another method, a weight has no
        scales or scales no weight, or their shapes and dtypes are inconsistent. All
        are listed.
    """
    tensors, wrong = _find(source, quantization)
    parts = {part for tensor in tensors.values() for part in tensor.parts}
    others = [key for key in source.keys() if key not in parts and key not in wrong]
    report = {
        "that cannot be decoded": [f"{key}: {why}" for key, why in wrong.items()],
        "that look block-scaled, though config.json does not say so": [
            key for key in others if _looks_block_scaled(key, source.dtype(key))
        ],
        "of the name that a decoded one takes": [k for k in others if k in tensors],
    }
    if any(report.values()):
        raise ValueError(f"'{source.name}' has tensors\n{format_report(report)}")
    if not tensors:
        return source
    return _BlockScaledSource(source, MappingProxyType(dict(tensors)))


@dataclasses.dataclass(frozen=True)
class _BlockScaledSource:
    """Source in which some tensors are decoded from those of another source."""

    source: Source
    tensors: Mapping[str, BlockScaled]

    @property
    def name(self) -> str:
        return self.source.name

    def keys(self) -> tuple[str, ...]:
        names = {
            part: name for name, tensor in self.tensors.items() for part in tensor.parts
        }
        return tuple(dict.fromkeys(names.get(key, key) for key in self.source.keys()))

    def shape(self, key: str) -> tuple[int, ...]:
        if key in self.tensors:
            return self.tensors[key].shape
        return self.source.shape(key)

    def dtype(self, key: str) -> np.dtype:
        if key in self.tensors:
            return np.dtype(ml_dtypes.bfloat16)
        return self.source.dtype(key)

    def read(self, key: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        if key not in self.tensors:
            return self.source.read(key, slices)
        tensor = self.tensors[key]
        return tensor.read(self.source, complete(slices, tensor.shape))


def _find(source: Source, quantization: Mapping[str, Any] | None) -> Found:
    if quantization is None:
        return {}, {}
    if not isinstance(quantization, Mapping):
        raise ValueError(f"quantization_config = {quantization!r} is not an object.")
    match quantization.get("quant_method"):
        case "fp8":
            return find_fp8(source, quantization.get("weight_block_size"))
        case "mxfp4":
            return find_mxfp4(source)
        case method:
            raise ValueError(
                f"'{source.name}' is quantised: its quant_method {method!r} is not "
                "decoded, fp8 and mxfp4 are. Take the model's original weights, or "
                "dequantise these with transformers and save them."
            )


def _looks_block_scaled(key: str, dtype: np.dtype) -> bool:
    packed = dtype == np.uint8 and key.endswith(("_blocks", "_scales"))
    return packed or dtype in _FP8 or key.endswith("_scale_inv")
