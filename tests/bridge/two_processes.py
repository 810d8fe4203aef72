"""One of two processes that load and save a Llama: `two_processes.py RANK ADDRESS DIR`.

Run by test_two_processes.py. Prints, as JSON, the bytes that this process read for each
way of sharding, and what it was told of the failures that are planted.
"""

import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
from bridge_helpers import mould_of
from jax.sharding import NamedSharding, PartitionSpec

import bridge
from bridge._tree import named_leaves

rank, address, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, num_processes=2, process_id=rank)
config = bridge.from_hf_config(folder / "llama")
mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
count, preadv = 0, os.preadv


def counting(*args):
    global count
    done = preadv(*args)
    count += done
    return done


os.preadv = counting


def mould(dim_of):
    """Splits each leaf over all devices along the dim that `dim_of` names, if any."""

    def shard(leaf):
        spec = [None] * len(leaf.shape)
        if (dim := dim_of(leaf.shape)) is not None:
            spec[dim] = "x"
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=sharding)

    return jax.tree.map(shard, mould_of(config))


def divisible(shape):
    return [dim for dim, size in enumerate(shape) if size % 8 == 0]


WAYS = {
    "replicated": lambda shape: None,
    "first dim": lambda shape: divisible(shape)[0],
    "last dim": lambda shape: divisible(shape)[-1],
}
whole = named_leaves(bridge.load_hf(folder / "llama", mould_of(config)))
found = {"read": {}, "told": []}
for way, dim_of in WAYS.items():
    count = 0
    params = bridge.load_hf(folder / "llama", mould(dim_of))
    found["read"][way] = count
    for name, leaf in named_leaves(params).items():
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[name][shard.index], name)

bridge.save_hf(folder / "out", params, config, max_shard_bytes=40_000)
assert (folder / "out" / "config.json").is_file()  # in both, once it returns


def attempt(action):
    try:
        action()
    except Exception as error:
        found["told"].append(f"{type(error).__name__}: {error}")


def fail_in(process):
    def progress(done, total):
        if rank == process and done > total / 2:
            raise OSError("no space left")

    return progress


for process in range(2):
    attempt(
        lambda process=process: bridge.save_hf(
            folder / "failed", params, config, progress=fail_in(process)
        )
    )
attempt(lambda: bridge.save_hf(folder / "out", params, config))
os.preadv = (lambda *_: 0) if rank == 1 else counting  # a file that ends early
attempt(lambda: bridge.load_hf(folder / "llama", mould(WAYS["replicated"])))
attempt(lambda: bridge.load_hf(folder / "llama", mould(WAYS["first dim"])))
print(json.dumps(found))
