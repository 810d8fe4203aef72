"""Writer of `torch_dist`: one chunk per tensor, readable by torch's DCP and Megatron.

Layers of the same kind are stacked under one key, as Megatron does. Each layer is a
separate chunk, so stacking copies no data.

Source: Megatron-LM megatron/core/transformer/transformer_block.py
::TransformerBlock.sharded_state_dict, megatron/core/transformer/moe/experts.py
::SequentialMLP.sharded_state_dict
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bridge.formats._source import Source
from bridge.megatron._key_mapping import hybrid_pattern, in_torch_dist
from bridge.megatron._vocab import pad_vocab
from bridge.megatron.read._find import FORMAT_NAME
from bridge.megatron.write._dcp import DcpWriter
from bridge.megatron.write._dp_reshardable import write_buckets
from bridge.megatron.write._optimizer_state import OptimizerState
from bridge.megatron.write._target import Target

_LAYER = re.compile(r"^(decoder\.layers)\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^(.*\bmlp\.experts)\.(\d+)\.(.+)$")


@dataclasses.dataclass(frozen=True)
class Slot:
    """Destination of a tensor on disk.

    Args:
      key: Key on disk.
      position: Indices of the tensor in the dims over which the key is stacked (layer,
        expert); empty if it is not stacked.
    """

    key: str
    position: tuple[int, ...]


def write_torch_dist(
    directory: Path,
    source: Source,
    slots: Mapping[str, Slot],
    target: Target,
    *,
    max_file_bytes: int,
    tick: Callable[[int], None],
    state: OptimizerState | None = None,
) -> None:
    """Writes the tensors, `.metadata` and `metadata.json`.

    One tensor is in memory at a time.

    Args:
      directory: Existing directory of the checkpoint.
      source: Tensors of the model by canonical name.
      slots: Destination of each tensor, as `slots_of` returns it.
      target: Run that the checkpoint is written for.
      max_file_bytes: Size in bytes at which a file is closed and the next one started.
      tick: Called after each tensor with its size in bytes.
      state: Adam state; None writes none.
    """
    with DcpWriter(directory, max_file_bytes) as writer:

        def write(tensors: Source, prefix: str) -> None:
            present = set(tensors.keys())
            for name, slot in slots.items():
                if name in present:
                    array = pad_vocab(name, tensors.read(name), target.multiple)
                    stacked = array.reshape((1,) * len(slot.position) + array.shape)
                    offsets = (*slot.position, *(0,) * array.ndim)
                    writer.add(prefix + slot.key, offsets, stacked)
                    tick(array.nbytes)

        write(source, "")
        if state is not None and state.format == "dp_reshardable":
            write_buckets(writer, source, state, target, tick)
        elif state is not None:
            for kind, tensors in state.kinds.items():
                write(tensors, f"optimizer.state.{_kind_on_disk(kind, state)}.")
        writer.finish()
    fields = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (directory / FORMAT_NAME).write_text(json.dumps(fields))


def _kind_on_disk(kind: str, state: OptimizerState) -> str:
    if kind != "master":
        return kind
    return "fp32_param" if state.format == "plain" else "param"


def slots_of(source: Source, args: Mapping[str, Any]) -> dict[str, Slot]:
    """Returns each tensor's destination on disk.

    Args:
      source: Tensors of the model by canonical name.
      args: Settings of the run.

    Raises:
      ValueError: If layers differ although `args` say that all are alike, or tensors of
        one key differ in shape or dtype or have missing positions.
    """
    names = frozenset(source.keys())
    stack_layers = _are_layers_alike(source, args)
    slots = {}
    for name in source.keys():
        key, position = in_torch_dist(name, names, args), []
        if stack_layers and (match := _LAYER.match(key)):
            key = f"{match[1]}.{match[3]}"
            position.append(int(match[2]))
        if match := _EXPERT.match(key):
            key = f"{match[1]}.experts.{match[3]}"
            position.append(int(match[2]))
        slots[name] = Slot(key, tuple(position))
    _check(source, slots)
    return slots


def _are_layers_alike(source: Source, args: Mapping[str, Any]) -> bool:
    """Returns whether Megatron stacks layers: if no setting mixes kinds of layers."""
    mixing = {
        name: args.get(name)
        for name in ("moe_layer_freq", "linear_attention_freq")
        if args.get(name) not in (None, 1)
    }
    if hybrid_pattern(args) or mixing or args.get("hetereogenous_dist_checkpoint"):
        return False
    layers: dict[str, set[str]] = {}
    for name in source.keys():
        if match := _LAYER.match(name):
            layers.setdefault(match[2], set()).add(match[3])
    common = set.intersection(*layers.values()) if layers else set()
    wrong = [f"  layer {n}: {sorted(names - common)}" for n, names in layers.items()]
    if any(names != common for names in layers.values()):
        raise ValueError(
            f"The layers of '{source.name}' differ, although args say that all are "
            "alike (no moe_layer_freq). What not all of them have:\n" + "\n".join(wrong)
        )
    return True


def _check(source: Source, slots: Mapping[str, Slot]) -> None:
    groups: dict[str, list[str]] = {}
    for name, slot in slots.items():
        groups.setdefault(slot.key, []).append(name)
    wrong = []
    for key, names in groups.items():
        kinds = {(source.shape(name), source.dtype(name)) for name in names}
        positions = [slots[name].position for name in names]
        counts = [len(set(of_dim)) for of_dim in zip(*positions, strict=True)]
        if len(kinds) > 1 or math.prod(counts) != len(names):
            wrong.append(f"  {key}: {len(names)} tensors that do not stack, {kinds}")
    if wrong:
        raise ValueError(f"'{source.name}' is not complete:\n" + "\n".join(wrong))
