"""Adam's state in a distributed checkpoint, by the names of the weights."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from bridge._source import Source
from bridge._torch_tensors import LazyTensor
from bridge._torch_zip import TensorSource
from bridge.megatron._names import canonical_tensors
from bridge.megatron._views import Tensor

# Megatron puts the kind in front of the weight's name; torch's FSDP, behind it.
_KINDS = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "param": "master",
    "fp32_param": "master",
    "master_param": "master",
}
_ANY_KIND = "|".join(sorted(_KINDS, key=len, reverse=True))
_OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?optimizer\.")
_KIND_FIRST = re.compile(rf"^state\.({_ANY_KIND})\.(.+)$")
_KIND_LAST = re.compile(rf"^state\.(.+)\.({_ANY_KIND})$")


@dataclasses.dataclass(frozen=True)
class MegatronOptimizer:
    """Adam's state; each source has the names and shapes of the model's tensors.

    Args:
      exp_avg: First moments.
      exp_avg_sq: Second moments.
      master: Weights as the optimizer holds them, in more bits than the model; None
        if the model's are those.
      step: Steps taken, as Adam's bias correction counts them; None if not said.
      param_groups: Settings of each group of parameters, such as `lr`, `betas`.
    """

    exp_avg: Source
    exp_avg_sq: Source
    master: Source | None
    step: int | None
    param_groups: tuple[Mapping[str, Any], ...]


def is_optimizer_key(key: str) -> bool:
    """Says whether a key of a distributed checkpoint is of the optimizer."""
    return _OPTIMIZER.match(key) is not None


def read_optimizer(
    name: str, tensors: Mapping[str, Tensor], common: Any
) -> tuple[MegatronOptimizer | None, tuple[str, ...]]:
    """Sorts an optimizer's tensors by what they are.

    Args:
      name: Where they come from.
      tensors: By key on disk, all of them keys of an optimizer.
      common: What the checkpoint says of the optimizer beside tensors.

    Returns:
      The state, or None without moments; and the keys that it does not hold.
    """
    kinds: dict[str, dict[str, Tensor]] = {
        "exp_avg": {},
        "exp_avg_sq": {},
        "master": {},
    }
    left_out = []
    for key, tensor in tensors.items():
        rest = _OPTIMIZER.sub("", key)
        if match := _KIND_FIRST.match(rest):
            kinds[_KINDS[match[1]]][match[2]] = tensor
        elif match := _KIND_LAST.match(rest):
            kinds[_KINDS[match[2]]][match[1]] = tensor
        else:
            left_out.append(key)
    if not kinds["exp_avg"] or not kinds["exp_avg_sq"]:
        return None, tuple(tensors)
    sources = {
        kind: TensorSource(f"{name} ({kind})", canonical_tensors(of_kind))
        for kind, of_kind in kinds.items()
    }
    groups = tuple(_param_groups(common))
    state = MegatronOptimizer(
        sources["exp_avg"],
        sources["exp_avg_sq"],
        sources["master"] if kinds["master"] else None,
        _step(groups, common),
        groups,
    )
    return state, tuple(left_out)


def _param_groups(common: Any) -> list[Mapping[str, Any]]:
    """Finds the groups; an optimizer of several has them one level down each."""
    if not isinstance(common, dict):
        return []
    if isinstance(groups := common.get("param_groups"), list):
        return [group for group in groups if isinstance(group, dict)]
    return [group for inner in common.values() for group in _param_groups(inner)]


def _step(groups: tuple[Mapping[str, Any], ...], common: Any) -> int | None:
    steps = {int(group["step"]) for group in groups if "step" in group}
    steps |= _common_steps(common)
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
