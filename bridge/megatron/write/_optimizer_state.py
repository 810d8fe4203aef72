"""Adam state to write: validated against the model, in the form of one optimizer."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from bridge._report import format_report
from bridge.formats._source import Source
from bridge.formats._tensor_source import TensorSource
from bridge.megatron._cast import Cast
from bridge.megatron._key_mapping import in_module
from bridge.megatron._param_class import ParamClass, class_of_group, class_of_param
from bridge.megatron._vocab import Keyed
from bridge.megatron.buffers._param_order import is_parameter
from bridge.megatron.read._optimizer import MegatronOptimizer

OptimizerFormat = Literal[
    "plain", "fully_reshardable", "dp_reshardable", "distributed", "fsdp_dtensor"
]
"""Form of the state: by name of a plain optimizer (`plain`), or one of the forms of a
distributed optimizer: by name (`fully_reshardable`), in flat buckets
(`dp_reshardable`), legacy files (`distributed`), or Megatron-FSDP's."""

FORMATS: Mapping[str, tuple[OptimizerFormat, ...]] = {
    "torch_dist": ("fully_reshardable", "dp_reshardable", "plain"),
    "legacy": ("distributed", "plain"),
    "fsdp_dtensor": ("fsdp_dtensor",),
}
"""Forms that a checkpoint format can hold; first the one of a distributed optimizer."""

FLOAT32 = np.dtype(np.float32)
_NAMES = {True: "experts", False: "dense weights"}


class ParamGroup(NamedTuple):
    """Parameter group to write.

    Args:
      kind: Class of the parameters in the group.
      settings: Settings of the group, without `params` and `step`.
    """

    kind: ParamClass
    settings: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class OptimizerState:
    """Adam state to write.

    Args:
      format: Form of the state.
      kinds: Tensors by kind (`"exp_avg"`, `"exp_avg_sq"`, and `"master"` if the
        optimizer holds weights of its own), with the model's names and shapes.
      chains: Parameter groups of the optimizer of dense weights, and, if there are
        any, of that of experts.
      step: Number of steps taken.
    """

    format: OptimizerFormat
    kinds: Mapping[str, Source]
    chains: tuple[tuple[ParamGroup, ...], ...]
    step: int

    def nbytes(self) -> int:
        """Returns the size of the state's tensors in bytes."""
        return sum(
            int(np.prod(source.shape(key), dtype=int)) * source.dtype(key).itemsize
            for source in self.kinds.values()
            for key in source.keys()
        )


def optimizer_state(
    source: Source,
    optimizer: MegatronOptimizer,
    args: Mapping[str, Any],
    format: OptimizerFormat,
    *,
    ranked: bool,
) -> OptimizerState:
    """Validates Adam state against a model.

    Args:
      source: Tensors of the model by canonical name.
      optimizer: Adam state with the names and shapes of the model's parameters.
      args: Settings of the run.
      format: Form to write. A distributed optimizer always holds master weights: where
        `optimizer` has none they are the model's weights in float32.
      ranked: Whether the files depend on the parallel sizes in `args`. Experts then
        have an optimizer of their own if there is expert parallelism; otherwise, if
        `optimizer` has parameter groups for them.

    Raises:
      ValueError: If tensors are missing or of another shape, if the number of steps is
        not known, or if the parameter groups are not Megatron's default ones.
    """
    kinds = {"exp_avg": optimizer.exp_avg, "exp_avg_sq": optimizer.exp_avg_sq}
    trained = [key for key in source.keys() if is_parameter(key)]
    is_narrow = any(source.dtype(key) != FLOAT32 for key in trained)
    if format == "fsdp_dtensor" or (format == "plain" and not is_narrow):
        pass  # it updates the weights themselves
    elif optimizer.master is not None:
        kinds["master"] = optimizer.master
    else:
        kinds["master"] = Cast(source, FLOAT32)
    wrong = {kind: _mismatches(source, of, trained) for kind, of in kinds.items()}
    if optimizer.step is None:
        wrong["step"] = ["the number of steps is not known"]
    if any(wrong.values()):
        raise ValueError(
            f"The optimizer's state does not fit '{source.name}':\n"
            f"{format_report(wrong)}"
        )
    groups = optimizer.param_groups
    if ranked:
        apart = (args.get("expert_model_parallel_size") or 1) > 1
    else:  # as in the run that the groups are of
        apart = any(group.get("is_expert_parallel") for group in groups)
    chains = _chains(source, trained, groups, args, apart)
    only = {kind: _only(trained, of) for kind, of in kinds.items()}
    return OptimizerState(format, only, chains, optimizer.step or 0)


def _only(keys: Sequence[str], source: Source) -> Source:
    tensors = {key: Keyed(source, key) for key in keys}
    return TensorSource(source.name, MappingProxyType(tensors))


def _mismatches(model: Source, state: Source, trained: Sequence[str]) -> list[str]:
    present = set(state.keys())
    return [f"{key} is missing" for key in trained if key not in present] + [
        f"{key} has the shape {state.shape(key)}, the weight {model.shape(key)}"
        for key in trained
        if key in present and state.shape(key) != model.shape(key)
    ]


def _chains(
    source: Source,
    trained: Sequence[str],
    groups: Sequence[Mapping[str, Any]],
    args: Mapping[str, Any],
    experts_apart: bool,
) -> tuple[tuple[ParamGroup, ...], ...]:
    names = frozenset(source.keys())
    needed = {
        class_of_param(
            in_module(key, names, args),
            source.shape(key),
            args,
            experts_apart=experts_apart,
        )
        for key in trained
    }
    found: dict[ParamClass, list[Mapping[str, Any]]] = {}
    for group in groups:
        found.setdefault(class_of_group(group), []).append(group)
    for kind in needed:  # a run without expert parallelism has no groups for experts
        if kind.is_expert and kind not in found:
            dense = found.get(ParamClass(kind.decays, False), [])
            found[kind] = [{**group, "is_expert_parallel": True} for group in dense]
    wrong = [
        f"  {len(found.get(kind, []))} groups for {_NAMES[kind.is_expert]} "
        f"{'with' if kind.decays else 'without'} weight decay, not 1"
        for kind in sorted(needed, reverse=True)
        if len(found.get(kind, [])) != 1
    ]
    if wrong:
        raise ValueError(
            "The parameter groups are not Megatron's default ones:\n" + "\n".join(wrong)
        )
    return tuple(
        tuple(
            ParamGroup(kind, _settings(found[kind][0]))
            for kind in sorted(needed, reverse=True)
            if kind.is_expert == is_expert
        )
        for is_expert in (False, True)
        if any(kind.is_expert == is_expert for kind in needed)
    )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "step")}
