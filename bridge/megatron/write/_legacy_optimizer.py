"""Optimizer state in the ranks' legacy files: parameters numbered group by group.

Source: Megatron-LM megatron/core/optimizer/optimizer.py
::Float16OptimizerWithFloat16Params.state_dict; pytorch torch/optim/optimizer.py
::Optimizer.state_dict
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridge.formats._source import Source
from bridge.megatron._key_mapping import in_module
from bridge.megatron._param_class import class_of_param
from bridge.megatron._ranks import Rank
from bridge.megatron.buffers._param_order import is_parameter, order_in_module
from bridge.megatron.write._optimizer_state import OptimizerState, ParamGroup
from bridge.megatron.write._optimizer_tree import counts_in_state, groups_with_step
from bridge.megatron.write._target import Target

OfRank = Mapping[tuple[int, str], tuple[tuple[int, ...], Any]]
"""Tensors of one rank: shape and placeholder in its file, by model chunk and name."""

RankTensors = dict[Rank, dict[tuple[int, str], tuple[tuple[int, ...], Any]]]
"""Tensors of all ranks."""


def names_in_order(source: Source, target: Target) -> list[str]:
    """Returns a model's canonical names in the order in which modules register them.

    A rank's parameters are numbered in this order.

    Raises:
      ValueError: If the registration order of a parameter is unknown.
    """
    names = frozenset(source.keys())

    def order(name: str) -> Any:
        stage, chunk, local = target.pipeline.place(name)
        _, local = target.pipeline.expert(local)
        return chunk, stage, order_in_module(in_module(local, names, target.args))

    trained = sorted(filter(is_parameter, source.keys()), key=order)
    # What is not trained comes last: it has no number.
    return trained + [name for name in source.keys() if not is_parameter(name)]


def legacy_optimizer(
    state: OptimizerState,
    model: OfRank,
    tensors: Mapping[str, OfRank],
    args: Mapping[str, Any],
    add_step: Callable[[], Any],
) -> Any:
    """Returns the `optimizer` of one rank's file.

    Args:
      state: Adam state.
      model: Parameters of the rank, in model order.
      tensors: State of the rank by kind, with the keys of `model`.
      args: Settings of the run.
      add_step: Writes the step count to the file and returns its placeholder.
    """
    params = [key for key in model if is_parameter(key[1])]
    trees, apart = [], len(state.chains) > 1
    for chain in state.chains:
        members = [
            [
                (chunk, name)
                for chunk, name in params
                if class_of_param(
                    name, model[chunk, name][0], args, experts_apart=apart
                )
                == group.kind
            ]
            for group in chain
        ]
        trees.append(_tree(state, chain, members, tensors, add_step))
    return trees[0] if len(trees) == 1 else trees


def _tree(
    state: OptimizerState,
    chain: Sequence[ParamGroup],
    members: Sequence[Sequence[tuple[int, str]]],
    tensors: Mapping[str, OfRank],
    add_step: Callable[[], Any],
) -> dict[str, Any]:
    torch_counts = counts_in_state(chain)
    states, groups = {}, []
    for group, params in zip(chain, members, strict=True):
        numbers = list(range(len(states), len(states) + len(params)))
        settings = {**group.settings, "params": numbers}
        groups.append(settings if torch_counts else {**settings, "step": state.step})
        for number, key in zip(numbers, params, strict=True):
            moments = {
                kind: tensors[kind][key][1] for kind in ("exp_avg", "exp_avg_sq")
            }
            # A tensor for each parameter: torch's Adam adds to it in place, which would
            # count a step several times in one that parameters share.
            counted = {"step": add_step()} if torch_counts else {}
            states[number] = {**counted, **moments}
    tree = {"state": states, "param_groups": groups}
    if "master" not in tensors:
        return tree
    masters = [[tensors["master"][key][1] for key in params] for params in members]
    return {"optimizer": tree, "fp32_from_fp16_params": masters}


def distributed_settings(state: OptimizerState) -> Any:
    """Returns the `optimizer` of a rank's file whose tensors are in another file."""
    trees = [
        {"optimizer": {"param_groups": groups_with_step(state, chain)}}
        for chain in state.chains
    ]
    return trees[0] if len(trees) == 1 else trees
