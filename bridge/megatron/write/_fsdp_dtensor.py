"""Writer of `fsdp_dtensor`, the checkpoints of Megatron-FSDP.

Layers and experts keep their numbers, gate and up are separate, and the model's weights
are those that the optimizer updates. torch reshards each tensor as it loads it, so one
chunk per tensor serves every number of ranks.

Dicts beside the tensors have an entry for each value: torch asks for these alone, and
Megatron keeps the value that it has where an entry is absent.

Source: Megatron-LM megatron/core/transformer/fsdp_dtensor_checkpoint.py
::handle_swiglu_in_state_dict, ::handle_experts_in_state_dict;
pytorch torch/distributed/checkpoint/_traverse.py::traverse_state_dict;
megatron/core/optimizer/distrib_optimizer.py
::DistributedOptimizer.sharded_param_state_fsdp_dtensor
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bridge.formats._source import Source
from bridge.megatron._key_mapping import in_module
from bridge.megatron._param_class import class_of_param
from bridge.megatron._tensor_parallel import is_gated
from bridge.megatron._vocab import pad_vocab
from bridge.megatron.buffers._param_order import is_parameter
from bridge.megatron.write._dcp import DcpWriter, StatePath
from bridge.megatron.write._optimizer_state import OptimizerState
from bridge.megatron.write._optimizer_tree import step_tensor
from bridge.megatron.write._target import Target

_MODEL = ("model",)
_MODULE = "module."
_PARAM = "module.module.module."
_FC1 = re.compile(r"\.mlp\.(?:\w+\.)*(?:\d+\.)?linear_fc1\.(?:weight|bias)\d*$")
# Settings of a group that torch's Adam and TransformerEngine's hold beside those that
# both have. A loader asks for the settings of its own Adam, and is refused without.
_SETTINGS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
    "bias_correction": True,
}


def write_fsdp_dtensor(
    directory: Path,
    source: Source,
    common: Mapping[str, Any],
    target: Target,
    *,
    max_file_bytes: int,
    tick: Callable[[int], None],
    state: OptimizerState | None = None,
) -> None:
    """Writes the tensors, the other state and `.metadata`.

    Args:
      directory: Existing directory of the checkpoint.
      source: Weights that the optimizer updates, by canonical name.
      common: State beside the tensors, by name.
      target: Run that the checkpoint is written for.
      max_file_bytes: Size in bytes at which a file is closed and the next one started.
      tick: Called after each tensor with its size in bytes.
      state: Adam state; None writes none.
    """
    names = frozenset(source.keys())
    with DcpWriter(directory, max_file_bytes) as writer:
        for name in source.keys():
            array = pad_vocab(name, source.read(name), target.multiple)
            for key, part in _parts(name, array, names, target):
                writer.add_entry((*_MODEL, _MODULE + key), part)
            tick(array.nbytes)
        if state is not None:
            _write_state(writer, source, state, target, tick)
        for path, value in _entries(common):
            writer.add_entry(path, value)
        writer.finish()


def _write_state(
    writer: DcpWriter,
    source: Source,
    state: OptimizerState,
    target: Target,
    tick: Callable[[int], None],
) -> None:
    names = frozenset(source.keys())
    groups = {group.kind: group for chain in state.chains for group in chain}
    apart = len(state.chains) > 1
    for name in filter(is_parameter, source.keys()):
        for kind, tensors in state.kinds.items():
            array = pad_vocab(name, tensors.read(name), target.multiple)
            for key, part in _parts(name, array, names, target):
                path = ("optimizer", "state", _PARAM + key)
                writer.add_entry((*path, kind), part)
                if kind == "exp_avg":
                    writer.add_entry((*path, "step"), step_tensor(state))
            tick(array.nbytes)
        module = in_module(name, names, target.args)
        kind_of = class_of_param(
            module, source.shape(name), target.args, experts_apart=apart
        )
        of = groups[kind_of]
        for field, value in {**_SETTINGS, **of.settings, "step": state.step}.items():
            path = ("optimizer", "param_to_group_meta", _PARAM + module, field)
            writer.add_entry(path, value)


def _entries(
    tree: Mapping[str, Any], path: StatePath = ()
) -> Iterator[tuple[StatePath, Any]]:
    """Yields the values of nested dicts with their keys; empty dicts yield none."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _entries(value, (*path, key))
        else:
            yield (*path, key), value


def _parts(
    name: str, array: np.ndarray, names: frozenset[str], target: Target
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors that a weight is stored as, by name in the module."""
    key = in_module(name, names, target.args)
    if is_gated(target.args) and _FC1.search(key):
        gate, up = np.split(array, 2)
        yield f"{key}_w", gate
        yield f"{key}_v", up
    else:
        yield key, array
