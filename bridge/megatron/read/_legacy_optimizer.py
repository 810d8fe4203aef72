"""Adam state in legacy files: maps parameter numbers to weight names.

torch numbers parameters group by group. Megatron groups the model's parameters, in
model order, by whether they have weight decay and whether they belong to experts. The
file records both properties of each group, and lists the model's parameter names in the
same order.

Source: Megatron-LM megatron/core/optimizer/__init__.py::_get_param_groups,
megatron/core/optimizer/optimizer.py::Float16OptimizerWithFloat16Params.state_dict
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from bridge.formats._torch_tensors import LazyTensor
from bridge.megatron._param_class import ParamClass, class_of_group, class_of_param
from bridge.megatron._ranks import Rank
from bridge.megatron._views import Tensor
from bridge.megatron.buffers._param_order import is_parameter
from bridge.megatron.read._legacy import LegacyDirectory, chunk_keys, merge_ranks
from bridge.megatron.read._verified import verify_states


class _Param(NamedTuple):
    chunk: str
    name: str
    shape: tuple[int, ...]


def is_distributed(legacy: LegacyDirectory) -> bool:
    """Returns whether the optimizer is distributed: its groups number no parameters."""
    groups = [
        group
        for tree in _trees(legacy.common)
        for group in tree.get("optimizer", tree).get("param_groups", [])
    ]
    return bool(groups) and all("params" not in group for group in groups)


def read_legacy_optimizer(legacy: LegacyDirectory) -> dict[str, dict[str, Tensor]]:
    """Returns each weight's moments, and its master weights if there are any.

    Args:
      legacy: Legacy checkpoint in which each rank holds a non-distributed `optimizer`.

    Returns:
      Tensors by canonical name for each of `"exp_avg"`, `"exp_avg_sq"` and `"master"`;
      no `"master"` if the optimizer updates the model's weights directly.

    Raises:
      ValueError: If the parameter groups differ from Megatron's default groups.
    """
    args = legacy.common["args"]
    found: dict[str, dict[Rank, dict[str, Any]]] = {}
    for rank, file in legacy.files.items():
        for param, states in _of_rank(file, args):
            for kind, tensor in states.items():
                chunks = found.setdefault(kind, {}).setdefault(
                    rank, {"args": args, **{key: {} for key in chunk_keys(file)}}
                )
                chunks[param.chunk][param.name] = tensor
    merged = {
        kind: merge_ranks(legacy.path, legacy.sizes, files)
        for kind, files in found.items()
    }
    trained = {name for name in legacy.tensors if is_parameter(name)}
    if any(set(state) != trained for state in merged.values()):
        raise ValueError("not all weights have the same kinds of state")
    return verify_states(merged, legacy.tensors) if "master" in merged else merged


def optimizer_steps(legacy: LegacyDirectory) -> list[int]:
    """Returns the step count of each parameter of the first rank."""
    states = [
        state
        for tree in _trees(legacy.common)
        for state in tree.get("optimizer", tree).get("state", {}).values()
    ]
    # Of TransformerEngine's Adam the groups hold the steps.
    steps = [s["step"] for s in states if isinstance(s, dict) and "step" in s]
    return [int(s.read() if isinstance(s, LazyTensor) else s) for s in steps]


def _of_rank(
    file: Mapping[str, Any], args: Mapping[str, Any]
) -> Iterator[tuple[_Param, dict[str, Tensor]]]:
    apart = (args.get("expert_model_parallel_size") or 1) > 1
    classes: dict[ParamClass, list[_Param]] = {}  # in model order
    for param in _params(file):
        key = class_of_param(param.name, param.shape, args, experts_apart=apart)
        classes.setdefault(key, []).append(param)
    for tree in _trees(file):
        inner = tree.get("optimizer", tree)
        masters = tree.get("fp32_from_fp16_params")
        if not inner.get("state") and any(
            group.get("params", True) for group in inner["param_groups"]
        ):
            raise ValueError("it is distributed: its state is in other files")
        for number, group in enumerate(inner["param_groups"]):
            params = classes.pop(class_of_group(group), [])
            if len(params) != len(group["params"]):
                raise ValueError(
                    f"group {number} has {len(group['params'])} parameters, the model "
                    f"{len(params)} such"
                )
            for position, index in enumerate(group["params"]):
                states = dict(inner["state"][index])
                if masters is not None:
                    states["master"] = masters[number][position]
                yield params[position], _checked(params[position], states)
    if classes:
        raise ValueError(f"{sum(map(len, classes.values()))} parameters have no group")


def _trees(file: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the optimizer states: dense weights, then experts if there are any."""
    optimizer = file.get("optimizer")
    trees = optimizer if isinstance(optimizer, list) else [optimizer]
    found = [tree for tree in trees if isinstance(tree, dict)]
    if len(found) < len(trees):
        raise ValueError("a rank has none")
    return found


def _params(file: Mapping[str, Any]) -> Iterator[_Param]:
    for chunk in chunk_keys(file):
        for name, tensor in file[chunk].items():
            if isinstance(tensor, LazyTensor) and is_parameter(name):
                if not name.endswith("_extra_state"):
                    yield _Param(chunk, name, tensor.shape)


def _checked(param: _Param, states: Mapping[str, Any]) -> dict[str, Tensor]:
    kept = {
        kind: tensor
        for kind, tensor in states.items()
        if kind in ("exp_avg", "exp_avg_sq", "master")
    }
    for kind, tensor in kept.items():
        if not isinstance(tensor, LazyTensor) or tensor.shape != param.shape:
            raise ValueError(f"{kind} of '{param.name}' is not of shape {param.shape}")
    return kept
