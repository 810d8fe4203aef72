"""A training loop that does nothing but save, to be killed at any moment.

`python saving_worker.py DIRECTORY NUM_STEPS` goes on from the newest step, which must
hold what was saved, and says on stdout what it has done.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import fsdp_jax as fsdp

SHAPE = (512, 512)


def state_at(step: int) -> fsdp.TrainState:
    """What belongs to a step: other numbers for each, in every leaf."""
    mesh = fsdp.make_mesh()
    rows = NamedSharding(mesh, PartitionSpec("dp_shard"))
    whole = NamedSharding(mesh, PartitionSpec())
    values = np.random.default_rng(step).normal(size=SHAPE).astype(np.float32)
    return fsdp.TrainState(
        step=jax.device_put(jnp.int32(step), whole),
        params={"w": jax.device_put(values, rows)},
        opt_state={"mu": jax.device_put(values[::-1], rows)},
        model_state={},
        key=jax.device_put(jax.random.key(step), whole),
        num_skipped=jax.device_put(jnp.int32(0), whole),
    )


def like() -> fsdp.TrainState:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        state_at(0),
    )


def check(state: fsdp.TrainState) -> int:
    """The step of a state; raises unless it holds what belongs to that step."""
    step = int(state.step)
    for got, want in zip(
        jax.tree.leaves(state), jax.tree.leaves(state_at(step)), strict=True
    ):
        if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    return step


def kill_while_saving(directory: Path, moment_secs: float) -> list[int]:
    """Starts a process that saves, and kills it that long after it began.

    Returns:
      The step it went on from, and those it said were committed.
    """
    command = [sys.executable, __file__, str(directory), "100000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as worker:
        assert worker.stdout is not None
        first = worker.stdout.readline().split()
        assert first[:1] == ["resumed"], "what it found was not what was saved"
        time.sleep(moment_secs)
        worker.kill()
        lines = [first, *(line.split() for line in worker.stdout)]
    return [int(number) for _, number in lines]


def main(directory: str, num_steps: int) -> None:
    with fsdp.Checkpointer(directory) as checkpointer:
        state = checkpointer.resume(like())
        start = 0 if state is None else check(state)
        print("resumed", start, flush=True)
        for step in range(start + 1, start + num_steps + 1):
            checkpointer.save(step, state_at(step), metadata={"step": step})
            checkpointer.wait()
            print("committed", step, flush=True)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    main(sys.argv[1], int(sys.argv[2]))
