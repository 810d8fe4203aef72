"""Fp8 weights with one scale per tensor or per row.

The names of FBGEMM (`X.weight_scale`, Llama 3.1 405B), of Model Optimizer (the same
with `X.input_scale`), and of `fp8` without a block size (`X.weight_scale_inv` with
`X.activation_scale`, Ministral 3), which in spite of its name is the scale itself.
"""

import math
from collections.abc import Collection

import numpy as np

from bridge.formats._source import Source
from bridge.formats.quantized._codes import Column, Plain, Scalar
from bridge.formats.quantized._scaled import FP8_DTYPES, ScaledWeight
from bridge.formats.quantized._weight import Found, Settings

_SCALES = (".weight_scale", ".weight_scale_inv")
_UNUSED = (
    *(".input_scale", ".activation_scale", ".input_scale_ub"),
    *(".k_scale", ".v_scale", ".output_scale"),
)


def find_fp8_scale(
    source: Source,
    settings: Settings,
    dtype: np.dtype,
    others: Collection[str] = (),
) -> Found:
    """Finds fp8 weights with one scale per tensor or per row; reads headers only.

    Args:
      source: Checkpoint.
      settings: `quantization_config`.
      dtype: Dtype of the decoded weights.
      others: Names of tensors that belong to weights of another format.

    Returns:
      Weights `X.weight`, and error messages by tensor name.
    """
    del settings
    keys = dict.fromkeys(source.keys())
    weights, wrong = {}, {}
    for key in keys:
        if not key.endswith(_SCALES) or key in others:
            continue
        name = key.rpartition(".")[0] + ".weight"
        if name not in keys or source.dtype(name) not in FP8_DTYPES:
            wrong[key] = f"there is no fp8 weight {name}"
            continue
        shape, grid = source.shape(name), source.shape(key)
        one = math.prod(grid) == 1
        rows = not one and grid in (shape[:1], (*shape[:1], 1))
        if len(shape) != 2 or not (rows or one):
            wrong[key] = f"{grid} scales of a weight {shape}: not one, nor one a row"
        elif source.dtype(key).name not in ("float16", "bfloat16", "float32"):
            wrong[key] = f"scales of {source.dtype(key)} are not decoded"
        else:
            column = Column(key) if len(grid) == 1 else Plain(key)
            weights[name] = ScaledWeight(
                shape=shape,
                dtype=dtype,
                codes=Plain(name),
                scales=column if rows else Scalar(key),
                block=(1 if rows else shape[0], shape[1]),
            )
    unused = tuple(key for key in keys if key.endswith(_UNUSED))
    return Found(weights, wrong, unused)
