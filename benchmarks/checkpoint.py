"""How fast checkpoints are written and read, against plain Orbax, torch and dd.

    python benchmarks/checkpoint.py [--gigabytes 1.2] [--rounds 3] [--out FILE]

Parameters and Adam's moments in float32, split over 8 simulated devices, to and from a
local disk. All forms take turns within one run, since a disk is not the same from one
minute to the next; each number is the median of the rounds, in GB/s of values. Reads
are cold: the files are dropped from the page cache before. JSON goes to stdout.

`save` of fsdp_jax includes its checksums and the manifest; `no checksums` is the same
arrays through the same Orbax settings without either. PyTorch is compared where it is
installed. `dd` writes zeros with fsync, and reads the files that fsdp_jax wrote.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import fsdp_jax as fsdp

LAYERS, WIDTH = 4, 1024
PACKAGES = ("jax", "orbax-checkpoint", "tensorstore", "numpy", "torch")


def make_state(gigabytes: float) -> fsdp.TrainState:
    """Three trees of the same shapes, as Adam's parameters and moments are."""
    rows = round(gigabytes * 1e9 / 3 / 4 / LAYERS / WIDTH / 8) * 8
    mesh = fsdp.make_mesh()
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp_shard"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    make = jax.jit(
        lambda key: jax.random.normal(key, (rows, WIDTH)), out_shardings=split
    )
    keys = iter(jax.random.split(jax.random.key(0), 3 * LAYERS))

    def tree() -> dict[str, jax.Array]:
        return {f"layers_{i}": make(next(keys)) for i in range(LAYERS)}

    zero, key = jax.device_put((jnp.int32(1), jax.random.key(0)), whole)
    opt_state = {"mu": tree(), "nu": tree()}
    state = fsdp.TrainState(zero, tree(), opt_state, {}, key, zero)
    return jax.block_until_ready(state)


def mould_of(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )


def orbax_forms(path: Path, arrays: dict[str, jax.Array], **options: Any):
    """Plain Orbax with a handler's options: (save, load)."""

    def checkpointer() -> ocp.Checkpointer:
        return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options))

    def save() -> None:
        with checkpointer() as writer:
            writer.save(path, args=ocp.args.PyTreeSave(arrays))

    def load() -> None:
        wanted = mould_of(arrays)
        arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
        with checkpointer() as reader:
            args = ocp.args.PyTreeRestore(item=wanted, restore_args=arguments)
            jax.block_until_ready(reader.restore(path, args=args))

    return save, load


def torch_forms(path: Path, arrays: dict[str, jax.Array]):
    """PyTorch's distributed checkpoint of one process, which does no fsync."""
    import torch
    import torch.distributed.checkpoint as dcp

    tensors = {n: torch.from_numpy(np.array(x)) for n, x in arrays.items()}
    return (
        lambda: dcp.save(tensors, checkpoint_id=str(path), no_dist=True),
        lambda: dcp.load(tensors, checkpoint_id=str(path), no_dist=True),
    )


def numpy_forms(path: Path, arrays: dict[str, jax.Array]):
    def save() -> None:
        path.mkdir()
        for name, array in arrays.items():
            np.save(path / name, np.asarray(array))

    return save, lambda: [np.load(path / f"{name}.npy") for name in arrays]


def dd_forms(path: Path, num_bytes: int):
    def run(*arguments: str) -> None:
        subprocess.run(["dd", "bs=4M", *arguments], check=True, capture_output=True)

    count = num_bytes // 2**22
    return (
        lambda: run("if=/dev/zero", f"of={path}", f"count={count}", "conv=fsync"),
        lambda: run(f"if={path}", "of=/dev/null"),
    )


def forms(scratch: Path, state: fsdp.TrainState, num_bytes: int) -> dict[str, Any]:
    """Name -> (path, save, load)."""
    arrays = {
        name.replace(".", "_"): leaf
        for name, leaf in fsdp.named_leaves((state.params, state.opt_state))
    }
    mould = mould_of(state)
    bare = {"use_zarr3": True, "use_compression": False}
    made: dict[str, Callable[[Path], Any]] = {
        "fsdp_jax": lambda path: (
            lambda: fsdp.save(path, state),
            lambda: jax.block_until_ready(fsdp.load(path, mould)),
        ),
        "orbax, no checksums": lambda path: orbax_forms(path, arrays, **bare),
        "orbax, as it comes": lambda path: orbax_forms(path, arrays),
        "np.save": lambda path: numpy_forms(path, arrays),
        "dd": lambda path: dd_forms(path, num_bytes),
    }
    if importlib.util.find_spec("torch"):
        made["torch dcp"] = lambda path: torch_forms(path, arrays)
    return {
        name: (scratch / name, *make(scratch / name)) for name, make in made.items()
    }


def seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def drop_from_cache(path: Path) -> None:
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def in_the_background(path: Path, state: fsdp.TrainState) -> dict[str, float]:
    """How long a `Checkpointer` keeps the loop from going on."""
    with fsdp.Checkpointer(path) as checkpointer:
        blocked = seconds(lambda: checkpointer.save(1, state))
        rest = seconds(checkpointer.wait)
    copied = seconds(lambda: jax.tree.map(np.array, (state.params, state.opt_state)))
    remove(path)
    return {"blocked_s": blocked, "rest_s": rest, "copy_to_host_s": copied}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    state = make_state(options.gigabytes)
    num_bytes = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    times: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        behind = in_the_background(Path(scratch) / "behind", state)
        for _ in range(options.rounds):
            for name, (path, save, load) in forms(
                Path(scratch), state, num_bytes
            ).items():
                taken = times.setdefault(name, {"save": [], "load": []})
                taken["save"].append(seconds(save))
                drop_from_cache(path)
                taken["load"].append(seconds(load))
                remove(path)
                print(name, {k: v[-1] for k, v in taken.items()}, file=sys.stderr)
    found = {
        "gigabytes": num_bytes / 1e9,
        "gb_per_s": {
            name: {
                what: round(num_bytes / 1e9 / statistics.median(values), 3)
                for what, values in taken.items()
            }
            for name, taken in times.items()
        },
        "seconds": times,
        "in_the_background": behind,
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "load_average": os.getloadavg(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            name: importlib.metadata.version(name)
            for name in PACKAGES
            if importlib.util.find_spec(name.split("-")[0])
        },
    }
    text = json.dumps(found, indent=2) + "\n"
    print(text, end="")
    if options.out:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
