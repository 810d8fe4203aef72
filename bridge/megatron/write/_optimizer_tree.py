"""Optimizer state beside the tensors: parameter groups and steps, as Megatron nests it.

Source: Megatron-LM megatron/core/optimizer/optimizer.py
::Float16OptimizerWithFloat16Params.sharded_state_dict, ::ChainedOptimizer.state_dict
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bridge.megatron.write._optimizer_state import OptimizerState, ParamGroup


def counts_in_state(chain: Sequence[ParamGroup]) -> bool:
    """Returns whether an optimizer counts its steps in each parameter's state.

    torch's Adam does; TransformerEngine's counts them in its parameter groups, and
    refuses state that it does not know.
    """
    return any("amsgrad" in group.settings for group in chain)


def step_tensor(state: OptimizerState) -> np.ndarray:
    """Returns the step count as torch's Adam holds it: a float32 scalar."""
    return np.asarray(state.step, np.float32)


def groups_with_step(
    state: OptimizerState, chain: Sequence[ParamGroup]
) -> list[dict[str, Any]]:
    """Returns the settings of parameter groups, each with the number of steps."""
    return [{**group.settings, "step": state.step} for group in chain]


def common_optimizer(state: OptimizerState, step: Any) -> Any:
    """Returns the optimizer's part of the common state of `torch_dist`.

    Args:
      state: Adam state.
      step: Placeholder of `step_tensor` in the file.
    """
    trees = [_common_tree(state, chain, step) for chain in state.chains]
    return trees[0] if len(trees) == 1 else dict(enumerate(trees))


def _common_tree(state: OptimizerState, chain: Sequence[ParamGroup], step: Any) -> Any:
    if state.format == "dp_reshardable":  # every rank stores its own groups
        return {"param_state_sharding_type": state.format}
    if state.format == "fully_reshardable":
        groups = {"param_groups": groups_with_step(state, chain)}
        return {"optimizer": groups, "param_state_sharding_type": state.format}
    if counts_in_state(chain):
        groups = [dict(group.settings) for group in chain]
        tree = {"state": {"common_step": step}, "param_groups": groups}
    else:
        tree = {"state": {}, "param_groups": groups_with_step(state, chain)}
    return {"optimizer": tree} if "master" in state.kinds else tree
