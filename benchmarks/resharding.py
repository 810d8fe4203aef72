"""Bytes and memory of `fsdp.reshard` and of `jax.device_put`, on simulated devices.

    python benchmarks/resharding.py [--embed 512] [--out FILE]

A state of AdamW moves from FSDP on 8 devices to FSDP and tp, to 4 devices and back. For
each: the bytes that move, the peak that the plan says, whether every leaf is the same
to the bit, and the seconds of the second time, with programs compiled. Where the
devices are the same ones, also the most that a device needs besides a leaf and its copy
when XLA reshards it. Seconds are those of a CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import result

import fsdp_jax as fsdp
from fsdp_jax.checkpoint._leaf_names import flatten

DEVICES, LAYERS = 8, 4
TENSOR = {"layers.up": -1, "layers.down": -2, "head": -1}
# name -> (devices, tp)
LAYOUTS = {"fsdp=8": (8, 1), "fsdp=2,tp=4": (8, 4), "fsdp=4": (4, 1)}
ROUTE = ("fsdp=8", "fsdp=2,tp=4", "fsdp=8", "fsdp=4", "fsdp=8")


def main() -> None:
    """Moves the state along the route twice, and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--embed", type=int, default=512)
    result.add_arguments(parser)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    conditions = result.begin(args, ("jax", "optax"))
    tx = optax.adamw(1e-3)
    plans = {name: plan_of(args.embed, *sizes) for name, sizes in LAYOUTS.items()}
    first = plans[ROUTE[0]]
    state = fsdp.init_state(first, tx, fsdp.init_params(first, jax.random.key(0)))
    want = digests(state)
    rows: dict[str, Any] = {}
    for _ in range(2):
        for before, after in zip(ROUTE, ROUTE[1:], strict=False):
            moves = fsdp.resharding.plan_moves(state, plans[after], tx, donate=True)
            began = time.perf_counter()
            state = fsdp.reshard(state, plans[after], tx, donate=True)
            secs = time.perf_counter() - began
            rows[f"{before} to {after}"] = {
                "bytes_moved": moves.bytes_moved,
                "bytes_before": moves.bytes_before,
                "peak_bytes": moves.peak_bytes,
                "bytes_after": moves.bytes_after,
                "exact": int(digests(state) == want),
                "secs": round(secs, 3),
            }
    row = rows["fsdp=8 to fsdp=2,tp=4"]
    row["device_put_temporaries"] = xla_temporaries(plans["fsdp=8"], plans[ROUTE[1]])
    row["pieces"] = moves_pieces(plans["fsdp=8"], plans[ROUTE[1]], tx)
    result.write(args, conditions, {"embed": args.embed, "rows": rows})


def plan_of(embed: int, devices: int, tp: int) -> fsdp.Plan:
    """Returns the plan of a stack of layers."""

    def make(key):
        shapes = {"up": (embed, 4 * embed), "down": (4 * embed, embed)}
        layers = {
            name: jax.random.normal(key, (LAYERS, *shape))
            for name, shape in shapes.items()
        }
        return {"layers": layers, "head": jnp.ones((embed, 8 * embed))}

    mesh = fsdp.make_mesh(tp=tp, devices=jax.devices()[:devices])
    config = fsdp.FSDPConfig(tensor_parallel=TENSOR if tp > 1 else {})
    return fsdp.fully_shard(make, mesh, [fsdp.Stacked("layers")], config)


def digests(state: fsdp.TrainState) -> dict[str, str]:
    """Returns the SHA-256 of each leaf in its logical shape."""
    return {
        name: hashlib.sha256(
            np.asarray(leaf.value)[tuple(map(slice, leaf.shape))].tobytes()
        ).hexdigest()
        for name, leaf in flatten(state).items()
    }


def moves_pieces(before: fsdp.Plan, after: fsdp.Plan, tx: Any) -> int:
    """Returns the bytes that two pieces of the largest leaf take beside it."""
    like = fsdp.abstract_state(before, tx)
    moves = fsdp.resharding.plan_moves(like, after, tx)
    return 2 * max(leaf.largest_piece for leaf in moves.leaves)


def xla_temporaries(before: fsdp.Plan, after: fsdp.Plan) -> int:
    """Returns the bytes of temporaries of XLA's own resharding of the worst leaf."""
    leaves = zip(
        jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True
    )
    sizes = [0]
    for here, there in leaves:
        move = jax.jit(lambda x: x, out_shardings=there.sharding)
        analysis = move.lower(here).compile().memory_analysis()
        assert analysis is not None
        sizes.append(analysis.temp_size_in_bytes)
    return max(sizes)


if __name__ == "__main__":
    main()
