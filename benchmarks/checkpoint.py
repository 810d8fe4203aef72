"""How fast checkpoints are written and read, against plain Orbax, torch and dd.

    python benchmarks/checkpoint.py [--gigabytes 1.2] [--rounds 5] [--stores 0]

Parameters and Adam's moments in float32, split over 8 simulated devices, to and from a
local disk. All forms take turns within one run, since a disk is not the same from one
minute to the next; each number is the median of the rounds, in GB/s of values. Reads
are cold: the files are dropped from the page cache before. JSON goes to stdout.

`save` of fsdp_jax includes its checksums and the manifest; `no checksums` is the same
but for these, as plain Orbax writes it with the same options. PyTorch is compared where
it is installed; neither it nor `np.save` waits for the disk, all others do. `dd` writes
zeros with fsync. Peak memory is what a form takes beside the state; of a load, what it
loads is in it. Linux only.

`--stores N` saves and loads N times besides by the protocols of GCS and S3, to a server
in Python on loopback: what the path costs, to which a bucket adds its network. With
`--rounds 0` it measures nothing else.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
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
import result

import fsdp_jax as fsdp
from fsdp_jax.checkpoint._orbax_handler import file_bytes
from fsdp_jax.checkpoint._paths import as_path

ROOT = Path(__file__).parents[1]
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


def abstract_of(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )


def orbax_forms(
    path: Path,
    arrays: dict[str, jax.Array],
    file_bytes: int | None = None,
    **options: Any,
):
    """Plain Orbax with a handler's options: (save, load)."""

    def checkpointer() -> ocp.Checkpointer:
        return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options))

    def save() -> None:
        with checkpointer() as writer:
            args = ocp.args.PyTreeSave(arrays, ocdbt_target_data_file_size=file_bytes)
            writer.save(path, args=args)

    def load() -> None:
        wanted = abstract_of(arrays)
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
        for name, leaf in fsdp.sharding.named_leaves((state.params, state.opt_state))
    }
    like = abstract_of(state)
    bare = {
        "use_zarr3": True,
        "use_compression": False,
        "file_bytes": file_bytes(num_bytes),
    }
    made: dict[str, Callable[[Path], Any]] = {
        "fsdp_jax": lambda path: (
            lambda: fsdp.save(path, state),
            lambda: jax.block_until_ready(fsdp.load(path, like)),
        ),
        "no checksums": lambda path: orbax_forms(path, arrays, **bare),
        "orbax": lambda path: orbax_forms(path, arrays),
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


def in_stores(state: fsdp.TrainState, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Saves and loads by each protocol, and saves in the background."""
    server = [sys.executable, str(ROOT / "tests" / "helpers" / "object_server.py")]
    found: dict[str, Any] = {}
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        url = served.stdout.readline().strip()
        os.environ |= {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        }
        for scheme in ("gs", "s3"):
            took = [in_store(f"{scheme}://bench/run", state) for _ in range(rounds)]
            times = medians(took)
            speeds = {
                what: round(num_bytes / 1e9 / times.pop(f"{what}_s"), 3)
                for what in ("save", "load")
            }
            found[scheme] = {"gb_per_s": speeds, "in_the_background": times}
        served.kill()
    return found


def in_store(path: str, state: fsdp.TrainState) -> dict[str, float]:
    """Seconds of a save, of a load, and of a save in the background."""
    like, run = abstract_of(state), as_path(path)
    saved = seconds(lambda: fsdp.save(path, state))
    loaded = seconds(lambda: jax.block_until_ready(fsdp.load(path, like)))
    run.rmtree()
    with fsdp.Checkpointer(path) as checkpointer:
        blocked = seconds(lambda: checkpointer.save(1, state))
        rest = seconds(checkpointer.wait)
    run.rmtree()
    return {"save_s": saved, "load_s": loaded, "blocked_s": blocked, "rest_s": rest}


def measured(action: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of an action, and gigabytes it takes at most, with what it returns."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed would not be taken anew
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = memory("VmRSS")
    taken = seconds(action)
    return taken, (memory("VmHWM") - before) / 1e9


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {
        what: round(statistics.median(found[what] for found in rounds), 3)
        for what in rounds[0]
    }


def compare(speeds: dict[str, Any], behind: dict[str, float]) -> dict[str, float]:
    """The figures that the targets are about, each of the same run."""
    ours, dd = speeds["fsdp_jax"], speeds["dd"]
    ratios = {
        "save_of_dd": ours["save"] / dd["save"],
        "save_of_no_checksums": ours["save"] / speeds["no checksums"]["save"],
        "save_of_orbax": ours["save"] / speeds["orbax"]["save"],
        "load_of_dd": ours["load"] / dd["load"],
        "load_of_orbax": ours["load"] / speeds["orbax"]["load"],
        **{
            f"{what}_of_{name.replace(' ', '_').replace('.', '_')}": (
                ours[what] / speeds[name][what]
            )
            for name in ("np.save", "torch dcp")
            if name in speeds
            for what in ("save", "load")
        },
        "blocked_of_copy_to_host": behind["blocked_s"] / behind["copy_to_host_s"],
    }
    return {what: round(value, 3) for what, value in ratios.items()}


def on_disk(state: fsdp.TrainState, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Compares all forms on the local disk."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        measured = measure(Path(scratch), state, num_bytes, rounds)
    times, peaks, behind = measured
    speeds = {
        name: {
            what: round(num_bytes / 1e9 / statistics.median(values), 3)
            for what, values in taken.items()
        }
        for name, taken in times.items()
    }
    return {
        "rounds": rounds,
        "compared": compare(speeds, medians(behind)),
        "gb_per_s": speeds,
        "peak_memory_gb": {name: medians(found) for name, found in peaks.items()},
        "in_the_background": medians(behind),
        "seconds": times,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stores", type=int, default=0, help="rounds in object stores")
    result.add_arguments(parser)
    options = parser.parse_args()
    conditions = result.begin(options, PACKAGES)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    state = make_state(options.gigabytes)
    num_bytes = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    found: dict[str, Any] = {"gigabytes": num_bytes / 1e9}
    if options.rounds:
        found |= on_disk(state, num_bytes, options.rounds)
    if options.stores:
        stores = in_stores(state, num_bytes, options.stores)
        found |= {"store_rounds": options.stores, "object_stores": stores}
    result.write(options, conditions, found)
    return 0


def measure(scratch: Path, state: fsdp.TrainState, num_bytes: int, rounds: int):
    """Seconds and peak memory of every form, and of saving in the background."""
    times: dict[str, dict[str, list[float]]] = {}
    peaks: dict[str, list[dict[str, float]]] = {}
    behind = []
    for _ in range(rounds):
        behind.append(in_the_background(scratch / "behind", state))
        for name, (path, save, load) in forms(scratch, state, num_bytes).items():
            saved, save_gb = measured(save)
            drop_from_cache(path)
            loaded, load_gb = measured(load)
            remove(path)
            taken = times.setdefault(name, {"save": [], "load": []})
            taken["save"].append(saved)
            taken["load"].append(loaded)
            peaks.setdefault(name, []).append({"save": save_gb, "load": load_gb})
            print(name, saved, loaded, save_gb, load_gb, file=sys.stderr)
    return times, peaks, behind


if __name__ == "__main__":
    sys.exit(main())
