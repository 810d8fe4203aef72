"""All-gather of batches and metrics between processes, in the order of their ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdp_jax.rl._batch import Batch
from fsdp_jax.rl._disk import from_bytes, to_bytes

_WORD = 2**31  # what an int32 counts to


def all_gather(batch: Batch, mesh: Mesh, axis: str) -> Batch:
    """Concatenates the rows of all processes along one mesh axis.

    Every process of the job calls it. Processes along other axes form separate groups:
    over `dp` of a mesh of 2 x 2, `("dp", "tp")`, the first and the third process
    exchange their rows, and the second and the fourth. It works on the host; rows of a
    sharded global array are gathered by `jax.device_put` instead.

    Args:
      batch: Batch of this process, with objects and meta as for `save_batch`; the
        number of rows may differ between processes.
      mesh: Device mesh of the processes.
      axis: Mesh axis to gather over.

    Returns:
      The concatenated batch, with this process's own meta.

    Raises:
      ValueError: If the devices of this process lie on several lines along the axis.

    Source: verl `protocol.py::all_gather_data_proto`.
    """
    ranks = _ranks_along(mesh, axis)
    bare = Batch(batch.arrays, batch.objects)
    gathered = [from_bytes(data) for data in _exchange(to_bytes(bare), ranks)]
    joined = Batch.concat(gathered)
    return Batch(joined.arrays, joined.objects, batch.meta)


def allgather_dict_into_dict(metrics: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Gathers the metrics of all processes into lists, in the order of their ranks.

    Args:
      metrics: Metrics by name; numbers, or any JSON values. A process that lacks a name
        is left out of its list.

    Raises:
      ValueError: If `metrics` is not a mapping.

    Source: verl `utils/torch_functional.py::allgather_dict_into_dict`.
    """
    if not isinstance(metrics, Mapping):
        raise ValueError(f"metrics must be a mapping, not {type(metrics).__name__}.")
    plain = {name: _plain(value) for name, value in metrics.items()}
    everyone = list(range(jax.process_count()))
    gathered = [json.loads(d) for d in _exchange(json.dumps(plain).encode(), everyone)]
    lists: dict[str, list[Any]] = {}
    for each in gathered:
        for name, value in each.items():
            lists.setdefault(name, []).append(value)
    return lists


def _plain(value: Any) -> Any:
    """Converts numbers and arrays of numpy or jax to Python values."""
    return value.tolist() if hasattr(value, "tolist") else value


def _ranks_along(mesh: Mesh, axis: str) -> list[int]:
    """Returns the processes on this one's line along an axis."""
    if axis not in mesh.axis_names:
        raise ValueError(f"The mesh has axes {mesh.axis_names}, without {axis}.")
    dim = mesh.axis_names.index(axis)
    process = np.vectorize(lambda device: device.process_index)(mesh.devices)
    lines = np.moveaxis(process, dim, -1).reshape(-1, mesh.devices.shape[dim])
    own = {
        tuple(dict.fromkeys(line.tolist()))
        for line in lines
        if jax.process_index() in line
    }
    if len(own) != 1:
        raise ValueError(
            f"Process {jax.process_index()} has devices on {len(own)} lines along "
            f"{axis}, with other processes each, and its rows belong to one. Order the "
            "mesh so that a process's devices differ along one axis alone."
        )
    return list(own.pop())


def _exchange(data: bytes, ranks: Sequence[int]) -> list[bytes]:
    """All-gathers the bytes of `ranks`, all of which call this."""
    if len(ranks) == 1:
        return [data]
    own = np.frombuffer(data, np.uint8)
    # Sizes first: an all-gather needs arrays of one shape.
    # In two numbers, since arrays of jax have 32 bits.
    halves = _all_gather(np.array(divmod(len(own), _WORD), np.int32), ranks)
    sizes = [high * _WORD + low for high, low in halves.tolist()]
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(own)] = own
    rows = _all_gather(padded, ranks)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def _all_gather(own: np.ndarray, ranks: Sequence[int]) -> np.ndarray:
    """All-gathers arrays of one shape from `ranks`: `[ranks, ...]`."""
    # One device per process: a jitted resharding over this mesh is the all-gather.
    devices = [_first_device(rank) for rank in ranks]
    mesh = Mesh(np.array(devices), ("rank",))
    split = NamedSharding(mesh, PartitionSpec("rank"))
    rows = jax.make_array_from_process_local_data(split, own[None])
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return np.asarray(whole(rows).addressable_data(0))


def _first_device(rank: int) -> Any:
    return next(d for d in jax.devices() if d.process_index == rank)
