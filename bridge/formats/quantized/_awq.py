"""AWQ: integers of 4 bits, packed along the outputs in an interleaved order.

`X.qweight` of shape `(in, out / 8)`, `X.qzeros` of shape `(groups, out / 8)` and
`X.scales` of shape `(groups, out)`. The eight codes of an integer are the outputs 0, 2,
4, 6, 1, 3, 5, 7, from its lowest bits on: the order of the version `gemm`.

Source: AutoAWQ `awq/modules/linear/gemm.py`, `awq/utils/packing_utils.py`.
"""

import numpy as np

from bridge.formats._source import Source
from bridge.formats.quantized._codes import Packed, Plain
from bridge.formats.quantized._gptq import check_shapes, packed_modules
from bridge.formats.quantized._scaled import ScaledWeight
from bridge.formats.quantized._weight import Found, Settings

VERSIONS = ("gemm",)
_BITS = 4
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of each output, in units of four bits


def find_awq(source: Source, settings: Settings, dtype: np.dtype) -> Found:
    """Finds the AWQ weights of a checkpoint; reads headers only.

    Args:
      source: Checkpoint.
      settings: `quantization_config`.
      dtype: Dtype of the decoded weights.

    Returns:
      Weights `X.weight`, and error messages by tensor name.
    """
    del settings
    weights: dict[str, ScaledWeight] = {}
    names, wrong = packed_modules(source)
    for name in names:
        try:
            group_size = _group_size(source, name)
        except ValueError as error:
            wrong[name] = str(error)
            continue
        weights[f"{name}.weight"] = ScaledWeight(
            shape=source.shape(f"{name}.scales")[1:]
            + source.shape(f"{name}.qweight")[:1],
            dtype=dtype,
            codes=Packed(f"{name}.qweight", _BITS, dim=1, order=_PLACES),
            scales=Plain(f"{name}.scales"),
            block=(group_size, 1),
            zeros=Packed(f"{name}.qzeros", _BITS, dim=1, order=_PLACES),
            transposed=True,
        )
    return Found(weights, wrong)


def _group_size(source: Source, name: str) -> int:
    if len(source.shape(f"{name}.scales")) != 2:
        raise ValueError("scales are not a matrix of groups and outputs")
    groups, out = source.shape(f"{name}.scales")
    inputs = source.shape(f"{name}.qweight")[0]
    packed = out * _BITS // 32
    expected = {"qweight": (inputs, packed), "qzeros": (groups, packed)}
    check_shapes(source, name, {**expected, "scales": (groups, 8 * packed)})
    if not groups or inputs % groups:
        raise ValueError(f"{inputs} inputs are not {groups} equal groups")
    return inputs // groups
