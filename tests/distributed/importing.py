"""What one process of a job sees that imports and exports a Llama."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bridge_helpers import like_of
from jax.sharding import NamedSharding, PartitionSpec

import bridge
from bridge._tree import named_leaves
from bridge.streaming import _processes as processes

WAYS = {
    "replicated": lambda shape: None,
    "first dim": lambda shape: divisible(shape)[0],
    "last dim": lambda shape: divisible(shape)[-1],
}


def divisible(shape):
    return [dim for dim, size in enumerate(shape) if size % jax.device_count() == 0]


def sharded_abstract_tree(config, dim_of):
    """Splits each leaf over all devices along the dim that `dim_of` names, if any."""
    num_devices = jax.device_count()
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((num_devices,), ("x",), axis_types=auto)

    def shard(leaf):
        spec = [None] * len(leaf.shape)
        if (dim := dim_of(leaf.shape)) is not None:
            spec[dim] = "x"
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=sharding)

    return jax.tree.map(shard, like_of(config))


class Counted:
    """`os.preadv`, and how many bytes it has read."""

    def __init__(self):
        self.preadv, self.count = os.preadv, 0

    def __call__(self, *args):
        done = self.preadv(*args)
        self.count += done
        return done


def import_and_export(folder: Path) -> dict[str, Any]:
    """The bytes read for each way of sharding, and what was told of planted failures.

    Args:
      folder: Has a model in `llama`; what is exported goes to `out`.
    """
    config = bridge.from_hf_config(folder / "llama")
    hung = hung_import(folder, config)
    os.preadv = counted = Counted()
    try:
        whole = named_leaves(bridge.load_hf(folder / "llama", like_of(config)))
        read = {}
        for way, dim_of in WAYS.items():
            counted.count = 0
            params = bridge.load_hf(
                folder / "llama", sharded_abstract_tree(config, dim_of)
            )
            read[way] = counted.count
            for name, leaf in named_leaves(params).items():
                for shard in leaf.addressable_shards:
                    np.testing.assert_array_equal(shard.data, whole[name][shard.index])
        check_changes(params, config)
        bridge.save_hf(folder / "out", params, config, max_shard_bytes=40_000)
        assert (folder / "out" / "config.json").is_file()  # in all, once it returns
        told = [
            *failed_exports(folder, params, config),
            *failed_imports(folder, config),
            hung,
        ]
    finally:
        os.preadv = counted.preadv
    return {"read": read, "told": told}


def check_changes(params, config) -> None:
    """Changes of all processes are those of the tensors, in each process."""

    def halved(leaf):
        shards = [np.array(shard.data) for shard in leaf.addressable_shards]
        # In process 1 alone, and not in one of several replicas.
        if jax.process_index() == 1 and leaf.addressable_shards[0].replica_id == 0:
            shards[0].ravel()[:3] *= 0.5
        parts = [
            jax.device_put(x, shard.device)
            for x, shard in zip(shards, leaf.addressable_shards, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding, parts
        )

    after = jax.tree.map(halved, params)
    old = {n: x.copy() for n, x in bridge.handover.named_tensors(params, config)}
    changes, _ = bridge.handover.changed_weights(
        bridge.handover.snapshot_weights(params, config), after
    )
    found = {change.name: change for change in changes}
    for name, tensor in bridge.handover.named_tensors(after, config):
        where = np.flatnonzero(tensor.ravel() != old[name].ravel())
        assert (name in found) == bool(len(where)), name
        if name in found:
            np.testing.assert_array_equal(found[name].positions, where)
            np.testing.assert_array_equal(found[name].values, tensor.ravel()[where])


def failed_exports(folder: Path, params, config) -> list[str]:
    """Told of a full disk under each of the first two, and of a folder in the way."""

    def fail_in(process):
        def progress(done, total):
            if jax.process_index() == process and done > total / 2:
                raise OSError("no space left")

        return progress

    def save(name, **options):
        return outcome(bridge.save_hf, folder / name, params, config, **options)

    failed = [save("failed", progress=fail_in(process)) for process in range(2)]
    return [*failed, save("out")]


def failed_imports(folder: Path, config) -> list[str]:
    """Told of a file that ends early, in process 1."""
    if jax.process_index() == 1:
        os.preadv = lambda *_: 0
    likes = [
        sharded_abstract_tree(config, WAYS[way]) for way in ("replicated", "first dim")
    ]
    return [outcome(bridge.load_hf, folder / "llama", like) for like in likes]


def hung_import(folder: Path, config) -> str:
    """Told when process 1 hangs until the other has waited in vain, and then fails."""
    waited = folder / "waited in vain"
    before = processes.TIMEOUT_SECS

    def progress(done, total):
        if jax.process_index() == 1:
            while not waited.exists():
                time.sleep(0.05)
            waited.rmdir()
            raise OSError("the disk hung")
        # Not before: a process may be late at an earlier point without having failed.
        processes.TIMEOUT_SECS = 1.0

    try:
        like = sharded_abstract_tree(config, WAYS["first dim"])
        return outcome(bridge.load_hf, folder / "llama", like, progress=progress)
    finally:
        processes.TIMEOUT_SECS = before
        if jax.process_index() == 0:
            waited.mkdir()


def outcome(action, *arguments, **options) -> str:
    """The error that it raises."""
    try:
        action(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "well"
