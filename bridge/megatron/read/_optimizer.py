"""Adam state by weight name, from all formats that store it."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bridge._report import fold_numbers
from bridge.formats._source import Source
from bridge.formats._tensor_source import TensorSource
from bridge.formats._torch_tensors import LazyTensor
from bridge.megatron._names import canonical_tensors
from bridge.megatron._views import Assembled, Tensor
from bridge.megatron.read._dp_reshardable import is_bucket_key, read_buckets
from bridge.megatron.read._legacy import LegacyDirectory
from bridge.megatron.read._legacy_distributed import read_distributed
from bridge.megatron.read._legacy_optimizer import (
    is_distributed,
    optimizer_steps,
    read_legacy_optimizer,
)
from bridge.megatron.read._verified import verify_states

# Megatron puts the kind before the weight's name; torch's FSDP puts it after.
_KINDS = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "param": "master",
    "fp32_param": "master",
    "master_param": "master",
}
_ANY_KIND = "|".join(sorted(_KINDS, key=len, reverse=True))
# With these settings the stored weights are not the rounded master weights, so the
# check in `verify_states` does not apply.
_QUANTIZED = ("fp8_param_gather", "fp8_param", "fp4_param")
_ADVICE = "save with --dist-ckpt-optim-fully-reshardable to carry it"
_OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?optimizer\.")
_KIND_FIRST = re.compile(rf"^state\.({_ANY_KIND})\.(.+)$")
_STEP = re.compile(r"^state\.(.+\.)?step$")
_KIND_LAST = re.compile(rf"^state\.(.+)\.({_ANY_KIND})$")


@dataclasses.dataclass(frozen=True)
class MegatronOptimizer:
    """Adam state; each source has the names and shapes of the model's tensors.

    Args:
      exp_avg: First moments.
      exp_avg_sq: Second moments.
      master: Master weights of higher precision than the model's weights; None if the
        checkpoint has none.
      step: Number of steps taken, as Adam's bias correction counts them; None if not
        recorded.
      param_groups: Settings of each parameter group, such as `lr` and `betas`.
    """

    exp_avg: Source
    exp_avg_sq: Source
    master: Source | None
    step: int | None
    param_groups: tuple[Mapping[str, Any], ...]


def is_optimizer_key(key: str) -> bool:
    """Returns whether a key of a distributed checkpoint belongs to the optimizer."""
    return _OPTIMIZER.match(key) is not None


def read_optimizer(
    name: str,
    tensors: Mapping[str, Assembled],
    model: Mapping[str, Tensor],
    args: Mapping[str, Any],
    common: Any,
) -> tuple[MegatronOptimizer | None, tuple[str, ...]]:
    """Reads the Adam state from an optimizer's tensors.

    Args:
      name: Name of the checkpoint, for error messages.
      tensors: Tensors of the optimizer by key on disk.
      model: Tensors of the model by canonical name.
      args: Settings of the run.
      common: Non-tensor state of the optimizer, such as parameter groups.

    Returns:
      Adam state, or None if there are no usable moments; and one line for each part of
      the optimizer that is not converted.

    Raises:
      ValueError: If parts of the state contradict each other.
    """
    flat = {key: tensor for key, tensor in tensors.items() if is_bucket_key(key)}
    named = {key: tensor for key, tensor in tensors.items() if key not in flat}
    kinds, steps, left_out = _sort(named)
    if flat:
        try:
            kinds = read_buckets(flat, model, args)
        except ValueError as error:
            reason = f"its {len(flat)} flat buckets are not understood: {error}"
            left_out.append(f"the optimizer's state: {reason}; {_ADVICE}")
    other = {
        key: (tensor.shape, model[key].shape)
        for of_kind in kinds.values()
        for key, tensor in of_kind.items()
        if key in model and model[key].shape != tensor.shape
    }
    if other:  # before 0.14 Megatron-Core flattened them
        key, (shape, of_model) = next(iter(other.items()))
        reason = f"of '{key}' it has the shape {shape}, not {of_model}"
        return None, (*left_out, f"the optimizer's state: {reason}; {_ADVICE}")
    if named and kinds["master"] and not any(args.get(key) for key in _QUANTIZED):
        kinds = verify_states(kinds, model)
    return _optimizer(name, kinds, common, steps), tuple(left_out)


def name_legacy_optimizer(
    legacy: LegacyDirectory,
) -> tuple[MegatronOptimizer | None, tuple[str, ...]]:
    """Reads the Adam state of a legacy checkpoint; returns as `read_optimizer` does."""
    try:
        distributed = is_distributed(legacy)
        kinds = (read_distributed if distributed else read_legacy_optimizer)(legacy)
        steps = [] if distributed else optimizer_steps(legacy)
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        # The file is untrusted and may have any structure. Report the error instead of
        # raising it, so that the weights can still be loaded.
        return None, (f"the optimizer's state is not understood: {error}; {_ADVICE}",)
    common = {"chain": dict(enumerate(_as_list(legacy.common["optimizer"])))}
    return _optimizer(str(legacy.path), kinds, common, steps), ()


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _optimizer(
    name: str,
    kinds: Mapping[str, Mapping[str, Tensor]],
    common: Any,
    steps: Iterable[int],
) -> MegatronOptimizer | None:
    if not kinds["exp_avg"] or not kinds["exp_avg_sq"]:
        return None
    sources = {
        kind: TensorSource(f"{name} ({kind})", MappingProxyType(dict(of_kind)))
        for kind, of_kind in kinds.items()
    }
    groups = tuple(_param_groups(common))
    return MegatronOptimizer(
        sources["exp_avg"],
        sources["exp_avg_sq"],
        sources["master"] if kinds.get("master") else None,
        _step(groups, common, steps),
        groups,
    )


def _sort(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, dict[str, Tensor]], list[int], list[str]]:
    """Sorts named tensors into state by kind, step counts and lines for the rest."""
    kinds: dict[str, dict[str, Tensor]] = {kind: {} for kind in set(_KINDS.values())}
    steps, others = [], []
    for key, tensor in tensors.items():
        rest = _OPTIMIZER.sub("", key)
        if match := _KIND_FIRST.match(rest):
            kinds[_KINDS[match[1]]][match[2]] = tensor
        elif match := _KIND_LAST.match(rest):
            kinds[_KINDS[match[2]]][match[1]] = tensor
        elif _STEP.match(rest):
            steps.append(int(tensor.read()))
        else:
            others.append(f"{key}: of the optimizer, and of unknown use")
    named = {kind: canonical_tensors(of_kind) for kind, of_kind in kinds.items()}
    return named, steps, fold_numbers(others)


def _param_groups(common: Any) -> list[Mapping[str, Any]]:
    """Returns all parameter groups; a chained optimizer nests them one level down."""
    if not isinstance(common, dict):
        return []
    if isinstance(groups := common.get("param_groups"), list):
        return [group for group in groups if isinstance(group, dict)]
    return [group for inner in common.values() for group in _param_groups(inner)]


def _step(
    groups: Sequence[Mapping[str, Any]], common: Any, found: Iterable[int]
) -> int | None:
    """Returns the number of steps taken, which is stored in one of three places."""
    steps = {int(group["step"]) for group in groups if "step" in group}
    steps |= _common_steps(common)
    steps |= set(found)
    if len(steps) > 1:
        raise ValueError(f"The optimizer's groups took {sorted(steps)} steps.")
    return steps.pop() if steps else None


def _common_steps(common: Any) -> set[int]:
    if not isinstance(common, dict):
        return set()
    step = common.get("common_step")
    if isinstance(step, LazyTensor):
        return {int(step.read())}
    return {number for inner in common.values() for number in _common_steps(inner)}
