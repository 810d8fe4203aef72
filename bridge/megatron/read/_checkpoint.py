"""Megatron checkpoints of all formats: detection, opening and canonical names."""

import dataclasses
import os
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bridge.formats._source import Source
from bridge.formats._tensor_source import TensorSource
from bridge.formats._torch_tensors import LazyTensor
from bridge.formats._torch_zip import read_torch_file
from bridge.megatron._names import canonical_tensors
from bridge.megatron.read._dcp import DcpDirectory, open_dcp
from bridge.megatron.read._find import find_format, find_iteration
from bridge.megatron.read._group_meta import is_group_meta, read_group_meta
from bridge.megatron.read._left_out import RANDOM, describe_left_out
from bridge.megatron.read._legacy import FILE_NAME, open_legacy
from bridge.megatron.read._legacy_distributed import DISTRIBUTED_NAME
from bridge.megatron.read._optimizer import (
    MegatronOptimizer,
    is_optimizer_key,
    name_legacy_optimizer,
    read_optimizer,
)

COMMON_NAME = "common.pt"
TRAIN_STATE_NAME = "train_state.pt"
COMMON_ITEM = "common_state/shard_0_1"

# In dp_reshardable each rank's optimizer stores its own settings, which are identical.
_SETTINGS = re.compile(
    r"^(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_0\.optimizer/"
)
_BUCKET_SIZES = re.compile(r"optimizer\..*\.per_bucket_numel(_unpadded)?(/|$)")
_COMMON_KEYS = (
    "args",
    "iteration",
    "checkpoint_version",
    "opt_param_scheduler",
    "num_floating_point_operations_so_far",
    "content_metadata",
)
# torch stores each value of a nested dict as an item of its own.
_COMMON_VALUE = re.compile(r"^(opt_param_scheduler|content_metadata)\.(\w+)$")


@dataclasses.dataclass(frozen=True)
class MegatronCheckpoint:
    """Opened Megatron checkpoint; tensors are lazy and not yet read.

    Args:
      path: Directory of the iteration.
      format: `"torch_dist"`, `"dcp"` (plain torch, or `fsdp_dtensor`) or `"legacy"`.
      source: Unsharded tensors of the model by canonical name (see
        `bridge.megatron._names`), with the vocabulary padded as saved.
      optimizer: Adam state, or None if it is absent or cannot be converted.
      args: Settings of the run that saved the checkpoint; empty if there are none.
      iteration: Number of training steps done; None if not recorded.
      consumed_samples: Number of training samples seen; None if not recorded.
      scheduler: State of the learning-rate schedule; empty if there is none.
      left_out: Contents of the files that no other field covers, one line each.
    """

    path: Path
    format: str
    source: Source
    optimizer: MegatronOptimizer | None
    args: Mapping[str, Any]
    iteration: int | None
    consumed_samples: int | None
    scheduler: Mapping[str, Any]
    left_out: tuple[str, ...]


def open_megatron(path: str | os.PathLike[str]) -> MegatronCheckpoint:
    """Opens a Megatron checkpoint of any format; reads metadata only.

    Needs neither Megatron nor torch, and executes no pickled code. The format is
    detected: `torch_dist` of old and new versions, `fsdp_dtensor`, plain `torch_dcp`,
    legacy `torch`, and NeMo's directories of these.

    Args:
      path: Directory given to `--save`, of which the latest iteration is used, or the
        directory of one iteration.

    Returns:
      Opened checkpoint with lazy tensors.

    Raises:
      FileNotFoundError: If `path` does not exist.
      ValueError: If `path` is not a Megatron checkpoint, has an unsupported format
        (zarr), is incomplete or damaged, or contains a pickle that would execute code.

    Examples:
      >>> bridge.save_megatron(path, params, config)
      >>> checkpoint = bridge.megatron.open_megatron(path)
      >>> checkpoint.args["num_layers"], len(checkpoint.source.keys())
      (2, 15)
    """
    directory = find_iteration(Path(path))
    format_ = find_format(directory)
    if format_ == "legacy":
        return _from_legacy(directory)
    return _from_dcp(directory, format_)


def _from_legacy(directory: Path) -> MegatronCheckpoint:
    legacy = open_legacy(directory)
    source = TensorSource(str(directory), MappingProxyType(dict(legacy.tensors)))
    optimizer, notes = None, ()
    if legacy.common.get("optimizer") is not None:
        optimizer, notes = name_legacy_optimizer(legacy)
    others = [key for key in RANDOM if key in legacy.common]
    read = {FILE_NAME} if optimizer is None else {FILE_NAME, DISTRIBUTED_NAME}
    others += sorted(
        str(file.relative_to(directory))
        for file in directory.glob("*/*optim*.pt")
        if file.name not in read
    )
    lines = (*notes, *describe_left_out(others))
    return _checkpoint(directory, "legacy", source, optimizer, legacy.common, lines)


def _from_dcp(directory: Path, format_: str) -> MegatronCheckpoint:
    dcp = open_dcp(directory)
    common = _common(dcp)
    model_keys = _model_keys(dcp)
    model = canonical_tensors({key: dcp.tensors[key] for key in model_keys})
    states = {key: dcp.tensors[key] for key in dcp.tensors if is_optimizer_key(key)}
    settings = [key for key in dcp.items if _SETTINGS.match(key)]
    metas = {key: read for key, read in dcp.items.items() if is_group_meta(key)}
    optimizer, notes = read_optimizer(
        str(directory),
        states,
        model,
        _dict(directory, common, "args"),
        {
            "common": common.get("optimizer"),
            **{k: dcp.items[k]() for k in settings},
            "by parameter": {"param_groups": read_group_meta(metas)},
        },
    )
    # Positions of the buckets, which their chunks tell too.
    sizes = {key for key in dcp.items if _BUCKET_SIZES.search(key)}
    used = {COMMON_ITEM, *_COMMON_KEYS, *model_keys, *states, *settings, *metas, *sizes}
    used |= {key for key in dcp.items if _COMMON_VALUE.match(key)}
    others = [key for key in (*dcp.tensors, *dcp.items) if key not in used]
    source = TensorSource(str(directory), MappingProxyType(model))
    left_out = (*notes, *describe_left_out(others))
    return _checkpoint(directory, format_, source, optimizer, common, left_out)


def _model_keys(dcp: DcpDirectory) -> list[str]:
    keys = [
        key
        for key in dcp.tensors
        if not is_optimizer_key(key) and not key.endswith("_extra_state")
    ]
    nested = [key for key in keys if key.startswith("model.")]
    return nested or [key for key in keys if not key.startswith(RANDOM)]


def _common(dcp: DcpDirectory) -> dict[str, Any]:
    """Returns the common (unsharded) state, from where this version stores it."""
    if (dcp.path / COMMON_NAME).is_file():
        common = read_torch_file(dcp.path / COMMON_NAME)
    elif COMMON_ITEM in dcp.items:
        common = dcp.items[COMMON_ITEM]()
    else:
        common = _common_items(dcp)
    if not isinstance(common, dict):
        raise ValueError(
            f"The common state of '{dcp.path}' is not a dict, but "
            f"{reprlib.repr(common)}"
        )
    return common


def _common_items(dcp: DcpDirectory) -> dict[str, Any]:
    """Returns the common state of which each value is an item."""
    common = {key: dcp.items[key]() for key in _COMMON_KEYS if key in dcp.items}
    for key, read in dcp.items.items():
        if match := _COMMON_VALUE.match(key):
            common.setdefault(match[1], {})[match[2]] = read()
    return common


def _checkpoint(
    directory: Path,
    format_: str,
    source: TensorSource,
    optimizer: MegatronOptimizer | None,
    common: Mapping[str, Any],
    left_out: tuple[str, ...],
) -> MegatronCheckpoint:
    if not source.keys():
        raise ValueError(f"'{directory}' holds 0 weights of a model.")
    args = _dict(directory, common, "args")
    scheduler = _dict(directory, common, "opt_param_scheduler")
    progress = _train_state(directory)
    iteration = progress.get("step", common.get("iteration"))
    samples = progress.get("consumed_train_samples", args.get("consumed_train_samples"))
    return MegatronCheckpoint(
        path=directory,
        format=format_,
        source=source,
        optimizer=optimizer,
        args=MappingProxyType(args),
        iteration=_number(directory, "iteration", iteration),
        consumed_samples=_number(directory, "consumed samples", samples),
        scheduler=MappingProxyType(scheduler),
        left_out=left_out,
    )


def _dict(directory: Path, common: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = common.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(
            f"'{key}' of '{directory}' is not a dict, but {reprlib.repr(value)}."
        )
    return value


def _train_state(directory: Path) -> dict[str, Any]:
    """Returns the training progress that Megatron-Bridge keeps in a separate file."""
    file = directory / TRAIN_STATE_NAME
    state = read_torch_file(file) if file.is_file() else {}
    if not isinstance(state, dict):
        raise ValueError(f"'{file}' is not a dict, but {reprlib.repr(state)}.")
    return state


def _number(directory: Path, what: str, value: Any) -> int | None:
    if isinstance(value, LazyTensor) and value.shape == ():
        value = value.read().item()
    if value is not None and not isinstance(value, int):
        raise ValueError(
            f"'{directory}' counts its {what} by {reprlib.repr(value)}, which is not a "
            "number."
        )
    return value
