"""Settings of the run that a checkpoint is written for."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from bridge.formats._pickle_writer import Name, Object
from bridge.formats._source import Source
from bridge.formats._torch_dtypes import DTYPE_NAMES
from bridge.megatron._names import EMBEDDING, HEAD
from bridge.megatron._ranks import ParallelSizes
from bridge.megatron._vocab import padded_shape

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
_PLAIN = (type(None), bool, int, float, str, bytes)


def plain_args(args: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Separates the settings of a checkpoint that can be written from the others.

    Args:
      args: Settings as in `MegatronCheckpoint.args`; some are objects of Megatron's
        classes.

    Returns:
      Plain settings for `write_megatron`, and the names of all other settings.
    """
    plain = {key: value for key, value in args.items() if _is_plain(value)}
    return plain, tuple(key for key in args if key not in plain)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    return type(value) in _PLAIN or (
        isinstance(value, np.dtype) and value in DTYPE_NAMES
    )


def with_facts(
    source: Source,
    args: Mapping[str, Any],
    sizes: ParallelSizes,
    vpp: int,
    multiple: int,
) -> dict[str, Any]:
    """Sets the settings that follow from tensors and sizes.

    Args:
      source: Tensors of the model by canonical name.
      args: Settings of the run.
      sizes: Numbers of model-parallel ranks.
      vpp: Number of model chunks per pipeline stage.
      multiple: Divisor of the padded number of vocabulary rows.

    Raises:
      ValueError: If `args` say otherwise or hold an object, or torch lacks a dtype.
    """
    keys = source.keys()
    if EMBEDDING not in keys:
        raise ValueError(
            f"'{source.name}' has no '{EMBEDDING}': it is not a whole model."
        )
    rows = padded_shape(EMBEDDING, source.shape(EMBEDDING), multiple)[0]
    told = {
        "num_layers": _count("layers", _LAYER, source),
        "num_experts": _count("experts", _EXPERT, source) or None,
        "untie_embeddings_and_output_weights": HEAD in keys,
    }
    wrong = [
        f"  {name}: args say {args[name]!r}, the tensors {value!r}"
        for name, value in told.items()
        if args.get(name) is not None and args[name] != value
    ]
    _, objects = plain_args(args)
    wrong += [f"  {name}: {args[name]!r} is not a plain value" for name in objects]
    wrong += [
        f"  {key}: torch has no dtype {source.dtype(key)}"
        for key in keys
        if source.dtype(key) not in DTYPE_NAMES
    ]
    if wrong:
        raise ValueError(f"'{source.name}' and args do not fit:\n" + "\n".join(wrong))
    return {
        **args,
        **told,
        "padded_vocab_size": rows,
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": sizes.tp,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
    }


def _count(what: str, pattern: re.Pattern[str], source: Source) -> int:
    numbers = {int(m[1]) for key in source.keys() if (m := pattern.search(key))}
    missing = sorted(set(range(max(numbers, default=-1) + 1)) - numbers)
    if missing:
        raise ValueError(f"'{source.name}' has no {what} {missing}: it is incomplete.")
    return len(numbers)


def common_state(
    args: Mapping[str, Any],
    iteration: int | None,
    scheduler: Mapping[str, Any] | None,
    optimizer_format: str | None,
) -> dict[str, Any]:
    """Returns the state that a checkpoint holds once, apart from the optimizer's.

    Args:
      args: Settings of the run.
      iteration: Number of training steps done; None for a release.
      scheduler: State of the learning-rate schedule; None writes none.
      optimizer_format: Form of the optimizer's state; None if there is none.
    """
    state = {key: _as_torch(value) for key, value in args.items()}
    contents: dict[str, Any] = {"singleton_local_shards": False}
    if optimizer_format is not None:  # experts' keys then have no prefix
        contents["chained_optim_avoid_prefix"] = True
    if optimizer_format in ("fully_reshardable", "dp_reshardable"):
        contents["distrib_optim_sharding_type"] = optimizer_format
    return {
        "args": Object(Name("argparse.Namespace"), state),
        "checkpoint_version": 3.0,
        "iteration": iteration or 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": contents,
        **({"opt_param_scheduler": dict(scheduler)} if scheduler else {}),
    }


def _as_torch(value: Any) -> Any:
    if isinstance(value, np.dtype):
        return Name(f"torch.{DTYPE_NAMES[value]}")
    return value
