"""Checkpoints of verl, and of FSDP2 programs that save as it does: a file per rank.

A directory holds `model_world_size_N_rank_R.pt` of every rank R, with its parts of the
weights, and `optim_world_size_N_rank_R.pt` and `extra_state_world_size_N_rank_R.pt`
beside them.

Source: verl verl/utils/checkpoint/fsdp_checkpoint_manager.py::FSDPCheckpointManager
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bridge._local_path import check_local
from bridge._report import format_report
from bridge.formats._dtensor import LocalShard
from bridge.formats._rank_shards import RankShards, merge_ranks
from bridge.formats._source import Source
from bridge.formats._tensor_source import TensorSource
from bridge.formats._torch_tensors import LazyTensor
from bridge.formats._torch_zip import read_torch_file

_FILE = re.compile(r"(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt")


@dataclasses.dataclass(frozen=True)
class VerlOptimizer:
    """Adam state; each source has the names and shapes of the trained weights.

    Args:
      exp_avg: First moments.
      exp_avg_sq: Second moments.
      step: Number of steps taken.
      param_groups: Settings of each parameter group, such as `lr` and `betas`.
    """

    exp_avg: Source
    exp_avg_sq: Source
    step: int
    param_groups: tuple[Mapping[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class VerlCheckpoint:
    """Opened checkpoint; tensors are lazy and not yet read.

    Args:
      path: Directory of the checkpoint.
      world_size: Number of ranks that saved it.
      source: Unsharded weights and buffers by PyTorch's names.
      optimizer: Adam state; None if the checkpoint has none.
      extra: State of the learning-rate schedule and of random generators, of each rank
        in order; empty if the checkpoint has none.
    """

    path: Path
    world_size: int
    source: Source
    optimizer: VerlOptimizer | None
    extra: tuple[Mapping[str, Any], ...]


def is_verl(path: str | os.PathLike[str]) -> bool:
    """Returns whether a directory holds a rank's weights by verl's file names."""
    check_local(path)
    path = Path(path)
    return path.is_dir() and any(_FILE.fullmatch(name) for name in os.listdir(path))


def open_verl(path: str | os.PathLike[str]) -> VerlCheckpoint:
    """Opens a checkpoint of verl; reads metadata only, and runs no pickled code.

    Weights that are split over ranks (FSDP2, or FSDP with a device mesh) are merged,
    those of replicas (HSDP) and buffers are compared when they are read.

    Args:
      path: Directory with the ranks' files, such as `global_step_100/actor`.

    Raises:
      FileNotFoundError: If there is no such directory.
      ValueError: If ranks are missing, are of several world sizes, or do not fit, or a
        file is damaged or would execute code.
    """
    check_local(path)
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"No checkpoint at '{path}': nothing is there.")
    found = _find(path)
    models = [_read_dict(file) for file in found["model"]]
    tensors = _merge(path, models)
    optimizer = None
    if found["optim"]:
        states = [_read_dict(file) for file in found["optim"]]
        optimizer = _optimizer(path, states, _trained(models[0], tensors))
    extra = tuple(_read_dict(file) for file in found["extra_state"])
    source = TensorSource(str(path), MappingProxyType(tensors))
    return VerlCheckpoint(path, len(models), source, optimizer, extra)


def _find(path: Path) -> dict[str, list[Path]]:
    """Returns the files of each kind in rank order."""
    matches = [m for name in os.listdir(path) if (m := _FILE.fullmatch(name))]
    sizes = sorted({int(match[2]) for match in matches})
    if len(sizes) != 1:
        raise ValueError(
            f"'{path}' holds files of {len(sizes)} world sizes {sizes}, not of 1."
        )
    present = {match[0] for match in matches}
    kinds = sorted({"model", *(match[1] for match in matches)})
    files = {
        kind: [
            path / f"{kind}_world_size_{sizes[0]}_rank_{rank}.pt"
            for rank in range(sizes[0])
        ]
        for kind in kinds
    }
    missing = [f.name for of in files.values() for f in of if f.name not in present]
    if missing:
        raise ValueError(
            f"'{path}' is not complete:\n{format_report({'missing': missing})}"
        )
    return {kind: files.get(kind, []) for kind in ("model", "optim", "extra_state")}


def _read_dict(file: Path) -> dict[Any, Any]:
    tree = read_torch_file(file)
    if not isinstance(tree, dict):
        raise ValueError(
            f"'{file}' holds a {type(tree).__name__}, not a dict, as verl writes: it "
            "is of another program, or damaged."
        )
    return tree


def _merge(path: Path, ranks: Sequence[Any]) -> dict[str, RankShards]:
    merged, wrong = {}, []
    names = list(dict.fromkeys(name for rank in ranks for name in rank))
    for name in names:
        parts = [rank[name] for rank in ranks if _is_tensor(rank.get(name))]
        try:
            if len(parts) != len(ranks):
                raise ValueError(
                    f"'{name}': {len(parts)} of {len(ranks)} ranks have it"
                )
            merged[name] = merge_ranks(name, parts)
        except ValueError as error:
            wrong.append(f"  {error}")
    if wrong:
        raise ValueError(f"The ranks of '{path}' do not fit:\n" + "\n".join(wrong))
    return merged


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (LazyTensor, LocalShard))


def _trained(
    state: Mapping[str, Any], tensors: Mapping[str, RankShards]
) -> dict[str, RankShards]:
    """Returns the parameters in the order in which an optimizer numbers them.

    A tied weight has two names, of which the first counts. Buffers are not split, and
    no parameter of a sharded model is complete.
    """
    seen, found = set(), {}
    for name, value in state.items():
        if isinstance(value, LocalShard):
            place = value.local.member, value.local.offset
            if place not in seen:
                found[name] = tensors[name]
            seen.add(place)
    return found


def _optimizer(
    path: Path, ranks: Sequence[Any], params: Mapping[str, RankShards]
) -> VerlOptimizer:
    _check_adam(path, ranks)
    first = ranks[0]
    sizes = [len(group["params"]) for group in first["param_groups"]]
    if sizes != [len(params)]:  # with several groups numbers do not follow the model
        raise ValueError(
            f"The optimizer of '{path}' has groups of {sizes} parameters, the model "
            f"{len(params)} parameters: which is which cannot be told."
        )
    named = dict(zip(first["param_groups"][0]["params"], params, strict=True))
    kinds = {}
    for kind in ("exp_avg", "exp_avg_sq"):
        states = [
            {named[n]: state[kind] for n, state in rank["state"].items()}
            for rank in ranks
        ]
        merged = _merge(path, states)
        wrong = [n for n, tensor in merged.items() if tensor.shape != params[n].shape]
        if wrong or set(merged) != set(params):
            raise ValueError(
                f"{kind} of '{path}' does not fit the weights: of other shape or "
                f"missing are {wrong or sorted(set(params) - set(merged))}"
            )
        kinds[kind] = TensorSource(f"{path} ({kind})", MappingProxyType(merged))
    steps = {_number(state["step"]) for state in first["state"].values()}
    if len(steps) != 1:
        raise ValueError(f"The parameters of '{path}' took {sorted(steps)} steps.")
    groups = tuple(
        {key: value for key, value in group.items() if key != "params"}
        for group in first["param_groups"]
    )
    return VerlOptimizer(kinds["exp_avg"], kinds["exp_avg_sq"], steps.pop(), groups)


def _check_adam(path: Path, ranks: Sequence[Any]) -> None:
    """Checks that ranks have the state of Adam for each parameter."""
    for rank, tree in enumerate(ranks):
        states, groups = tree.get("state"), tree.get("param_groups")
        if not isinstance(states, dict) or not isinstance(groups, list):
            raise ValueError(
                f"The optimizer of rank {rank} of '{path}' has {sorted(map(str, tree))}"
                ", not 'param_groups' and 'state' of an optimizer of torch."
            )
        kept = {name for state in states.values() for name in state}
        lacking = sorted(
            name
            for name in ("exp_avg", "exp_avg_sq", "step")
            if not states or any(name not in state for state in states.values())
        )
        if lacking:
            raise ValueError(
                f"The optimizer of rank {rank} of '{path}' is not Adam: of "
                f"{len(states)} parameters it has {sorted(kept)}, not {lacking}. "
                f"Remove the files optim_world_size_* to read the weights alone."
            )


def _number(step: Any) -> int:
    if isinstance(step, LocalShard):
        step = step.local
    return int(step.read() if isinstance(step, LazyTensor) else step)
