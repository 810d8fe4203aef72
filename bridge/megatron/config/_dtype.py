"""Transforms of `TransformerConfig` fields for the dtype of the weights."""

from collections.abc import Mapping
from typing import Any

from bridge.families._field_transform import FieldTransform
from bridge.models import DecoderConfig

_FLAGS = {"bf16": "bfloat16", "fp16": "float16"}


def _read(fields: Mapping[str, Any]) -> dict[str, Any]:
    flags = [dtype for name, dtype in _FLAGS.items() if fields[name]]
    by_flag = flags[0] if flags else "float32"
    given = fields["params_dtype"]
    if isinstance(given, Mapping):  # in a YAML file
        given = given.get("_target_")
    named = str(given).rpartition(".")[2] if given is not None else by_flag
    if len(flags) > 1 or (flags and named != by_flag):
        raise ValueError(f"params_dtype = {given}, but {' and '.join(flags)} by flag")
    return {"dtype": named}


def _write(config: DecoderConfig) -> dict[str, Any]:
    flags = {name: config.dtype == dtype for name, dtype in _FLAGS.items()}
    return {"params_dtype": config.dtype, "pipeline_dtype": config.dtype, **flags}


DTYPE_CODEC = FieldTransform(("params_dtype", *_FLAGS), _read, _write)
