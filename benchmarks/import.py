"""How fast, and in how much memory, a checkpoint is loaded and written.

    python benchmarks/import.py --dir DIR [--runs 5] [--out FILE]

A random bfloat16 Llama of about 1 GB is made in DIR, without torch, and loaded onto 8
simulated CPU devices: by `bridge.load_hf` as FSDP shards it, stacked and transposed; by
`safetensors` and `jax.device_put`, tensor by tensor in the file's own layout; by Orbax
in the file's layout, and by Orbax with XLA making FSDP's layout of that; and by
`transformers`, onto one device. A `torch_dist` checkpoint of the same model, as
Megatron loads it, is converted to Hugging Face's files. Beside them the same bytes are
merely read, written, and copied. Each run is a process of its own, runs are
interleaved, and figures are medians. JSON goes to stdout.

Cold: none of the file is in the page cache, and /proc/self/io confirms that all of it
came from the disk. Warm: all of it is cached, and none did. Linux only.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import result

ROOT = Path(__file__).resolve().parent.parent
DEVICES = 8
EMBED, MLP, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 2048, 5632, 32, 4, 64, 10, 32000
CHUNK_BYTES = 8 << 20


# What is compared. Imports are inside: each process loads only what it runs.


def by_bridge(checkpoint):
    """Loads as FSDP shards it, each kernel transposed and layers stacked."""
    import jax

    import bridge

    like = abstract_params(checkpoint)
    yield
    params = bridge.load_hf(checkpoint, like)
    yield jax.block_until_ready(params)


def by_safetensors(checkpoint):
    """Reads and shards tensor by tensor, in the file's own layout: what one writes."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec
    from safetensors import safe_open

    mesh = jax.make_mesh((DEVICES,), ("x",))
    arrays = {}
    yield
    with safe_open(checkpoint / "model.safetensors", "np") as file:
        for key in file.keys():
            tensor = file.get_tensor(key)
            sharding = NamedSharding(mesh, PartitionSpec("x"))
            arrays[key] = jax.device_put(tensor, sharding)
    yield jax.block_until_ready(arrays)


def by_orbax(checkpoint):
    """Loads with Orbax, sharded by rows: it neither transposes nor stacks."""
    like = orbax_like(checkpoint)
    yield
    yield read_by_orbax(checkpoint, like)


def by_orbax_as_fsdp(checkpoint):
    """Loads with Orbax; then XLA transposes, stacks and moves to FSDP's shards."""
    import jax
    import jax.numpy as jnp
    from jax.tree_util import keystr

    like, wanted = orbax_like(checkpoint), abstract_params(checkpoint)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)

    def as_fsdp(arrays):
        def made(path, leaf):
            name = ".".join(
                part
                for part in keystr(path, simple=True, separator=".").split(".")
                if part not in ("kernel", "embedding", "scale", "value")
            )
            kept = name.endswith(("norm", "embed_tokens"))
            own = [arrays[key] for key in tensors_of(name)]
            own = [tensor if kept else tensor.T for tensor in own]
            return jnp.stack(own).reshape(leaf.shape)

        return jax.tree_util.tree_map_with_path(made, wanted)

    compiled = jax.jit(as_fsdp, out_shardings=shardings).lower(like).compile()
    yield
    arrays = read_by_orbax(checkpoint, like)
    yield jax.block_until_ready(compiled(arrays))


def tensors_of(name):
    """Names of the file's tensors that make a leaf of the tree."""
    if name == "lm_head":
        return ["lm_head.weight"]
    if name.startswith("layers."):
        part = name.removeprefix("layers.")
        part = part.replace("pre_feedforward_layernorm", "post_attention_layernorm")
        return [f"model.layers.{i}.{part}.weight" for i in range(LAYERS)]
    return [f"model.{name}.weight"]


def orbax_like(checkpoint):
    import jax
    import orbax.checkpoint.experimental.v1 as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    # A mesh of automatic axes, so that XLA propagates its shardings.
    mesh = Mesh(jax.devices(), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    layout = ocp.options.CheckpointLayout.SAFETENSORS
    with ocp.Context(checkpoint_layout=layout):
        found = ocp.metadata(checkpoint).metadata
    return {
        key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for key, leaf in found.items()
    }


def read_by_orbax(checkpoint, like):
    import jax
    import orbax.checkpoint.experimental.v1 as ocp

    layout = ocp.options.CheckpointLayout.SAFETENSORS
    with ocp.Context(checkpoint_layout=layout):
        return jax.block_until_ready(ocp.load(checkpoint, like))


def by_transformers(checkpoint):
    """Loads into one process's memory; pages of the file are mapped, not copied."""
    from transformers import LlamaForCausalLM  # the model's own module, beforehand

    yield
    yield LlamaForCausalLM.from_pretrained(checkpoint, dtype="auto")


def by_raw_read(checkpoint):
    """Reads the same bytes into one buffer, over and over."""
    yield
    buffer = bytearray(CHUNK_BYTES)
    with (checkpoint / "model.safetensors").open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    yield


def by_eighth(checkpoint):
    """Reads what one of eight hosts reads: an eighth of the rows of each tensor."""
    import numpy as np

    import bridge
    from bridge._box import Range, shape_of, whole
    from bridge.formats._source import read_into

    source = bridge.open_checkpoint(checkpoint)
    yield
    for key in source.keys():
        rows, *others = whole(source.shape(key))
        box = (Range(3 * rows.stop // 8, 4 * rows.stop // 8), *others)
        out = np.empty(shape_of(box), source.dtype(key))
        read_into(source, key, box, out, ahead=False)
    yield


def by_export(checkpoint):
    """Writes what was loaded as FSDP shards it, in the file's layout again."""
    import jax

    import bridge

    params = jax.block_until_ready(
        bridge.load_hf(checkpoint, abstract_params(checkpoint))
    )
    config = bridge.from_hf_config(checkpoint)
    out = fresh(checkpoint.parent / "out")
    yield
    bridge.save_hf(out, params, config)
    yield
    written = sum(file.stat().st_size for file in out.iterdir())
    if written < (checkpoint / "model.safetensors").stat().st_size:
        raise ValueError(f"{written:,} bytes are too few for an export.")


def by_raw_write(checkpoint):
    """Writes the same number of bytes from memory, and waits for the disk alike."""
    data = memoryview(os.urandom(CHUNK_BYTES))
    size = (checkpoint / "model.safetensors").stat().st_size
    out = fresh(checkpoint.parent / "out")
    out.mkdir()
    yield
    with (out / "model.safetensors").open("wb", buffering=0) as file:
        for start in range(0, size, CHUNK_BYTES):
            file.write(data[: size - start])
        os.fsync(file.fileno())
    yield


def by_conversion(checkpoint):
    """Turns Megatron's checkpoint into Hugging Face's files, without devices."""
    import bridge

    megatron = checkpoint.with_name("megatron")
    config = bridge.from_hf_config(checkpoint)
    out = fresh(checkpoint.parent / "out")
    yield
    tree, _ = bridge.megatron.lazy_megatron(megatron, config)
    bridge.save_hf(out, tree, config)
    yield


def by_raw_copy(checkpoint):
    """Reads the same number of bytes from one file, and writes them to another."""
    out = fresh(checkpoint.parent / "out")
    out.mkdir()
    yield
    buffer = bytearray(CHUNK_BYTES)
    source = checkpoint / "model.safetensors"
    with (
        source.open("rb", buffering=0) as read,
        (out / source.name).open("wb", buffering=0) as written,
    ):
        while count := read.readinto(buffer):
            written.write(memoryview(buffer)[:count])
        os.fsync(written.fileno())
    yield


IMPORTS = {
    "bridge": by_bridge,
    "safetensors_device_put": by_safetensors,
    "orbax": by_orbax,
    "orbax_as_fsdp": by_orbax_as_fsdp,
    "transformers": by_transformers,
    "raw_read": by_raw_read,
}
HOSTS = {"bridge_eighth": by_eighth}
EXPORTS = {"bridge_export": by_export, "raw_write": by_raw_write}
CONVERSIONS = {"bridge_conversion": by_conversion, "raw_copy": by_raw_copy}


def abstract_params(checkpoint):
    import jax
    from flax import nnx

    import bridge
    import fsdp_jax as fsdp
    from bridge.models import Decoder, DecoderLayer

    config = bridge.from_hf_config(checkpoint)

    def make(key):
        return Decoder(config, rngs=nnx.Rngs(key), scan=fsdp.scan)

    plan = fsdp.fully_shard(make, fsdp.make_mesh(), units=[DecoderLayer])
    # Main weights would be float32, and twice the bytes to fill.
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, config.dtype, sharding=leaf.sharding
        ),
        plan.params,
    )


def fresh(path):
    shutil.rmtree(path, ignore_errors=True)
    return path


# The checkpoint


def make_checkpoint(path):
    """Writes a random Llama with the safetensors package, if it is not there yet."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    if path.is_dir():
        return
    partial = fresh(path.with_name("partial"))
    partial.mkdir(parents=True)
    random = np.random.default_rng(0)

    def weights(*shape):
        bits = random.integers(0, 1 << 16, shape, np.uint16)
        return (bits & 0xBFFF).view(ml_dtypes.bfloat16)  # magnitudes below 2

    tensors = {
        "model.embed_tokens.weight": weights(VOCAB, EMBED),
        "lm_head.weight": weights(VOCAB, EMBED),
        "model.norm.weight": weights(EMBED),
    }
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, EMBED),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, EMBED),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, EMBED),
        "self_attn.o_proj": (EMBED, HEADS * HEAD_DIM),
        "mlp.gate_proj": (MLP, EMBED),
        "mlp.up_proj": (MLP, EMBED),
        "mlp.down_proj": (EMBED, MLP),
        "input_layernorm": (EMBED,),
        "post_attention_layernorm": (EMBED,),
    }
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = weights(*shape)
    save_file(tensors, partial / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": EMBED,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rope_theta": 10000.0,
        "dtype": "bfloat16",
    }
    (partial / "config.json").write_text(json.dumps(config))
    partial.rename(path)


def make_megatron(checkpoint):
    """Writes the same model as Megatron loads it, if it is not there yet."""
    import bridge

    path = checkpoint.with_name("megatron")
    if not path.is_dir():
        bridge.save_megatron(path, *bridge.lazy_hf(checkpoint))


def files_of(checkpoint):
    """All files that a contender may read."""
    megatron = checkpoint.with_name("megatron")
    return [
        checkpoint / "model.safetensors",
        *filter(Path.is_file, megatron.rglob("*")),
    ]


def set_cache(file, warm):
    """Puts all of a file into the page cache, or none of it."""
    with file.open("rb", buffering=0) as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(CHUNK_BYTES)
        while warm and stream.readinto(buffer):
            pass


# One run, in a process of its own


def run_child(name, checkpoint, warm):
    """Runs one contender, and says what it took; `warm` is None if nothing is read."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = os.environ.get("XLA_FLAGS", "")
    count = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{flags} {count}"
    steps = (IMPORTS | HOSTS | EXPORTS | CONVERSIONS)[name](checkpoint)
    next(steps)
    if warm is not None:
        for file in files_of(checkpoint):
            set_cache(file, warm)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before, read_before = status("VmRSS"), read_bytes()
    started = time.perf_counter()
    held = next(steps)
    seconds = time.perf_counter() - started
    found = {
        "seconds": seconds,
        "peak_bytes": status("VmHWM") - before,
        "resident_bytes": status("VmHWM"),
        "disk_bytes": read_bytes() - read_before,
    }
    del held
    next(steps, None)
    print(json.dumps(found))


def status(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}.")


def read_bytes():
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def run(name, checkpoint, cache):
    argv = [sys.executable, __file__, "--dir", str(checkpoint.parent), "--child", name]
    child = subprocess.run(
        [*argv, "--cache", cache],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(child.stdout.splitlines()[-1])


# The report


def median(runs):
    return {
        figure: statistics.median(found[figure] for found in runs) for figure in runs[0]
    }


def check_cache(rows, size):
    """Cold runs must have read the disk, and warm ones not.

    transformers maps the file, and leaves pages unread that nothing has touched yet.
    """
    for row in rows:
        share = row["disk_bytes"] / size
        whole = row["name"] in ("bridge", "safetensors_device_put", "raw_read")
        if row["cache"] == "cold" and whole and share < 0.99:
            raise ValueError(f"{row['name']} read {share:.2f} of a cold file.")
        if row["cache"] == "warm" and share > 0.01:
            raise ValueError(f"{row['name']} read {share:.2f} of a warm file.")


def compare(rows, size):
    """The figures that the targets are about, each from the same set of runs."""
    by_key = {(row["name"], row["cache"]): row for row in rows}

    def ratio(a, b, cache):
        return round(by_key[a, cache]["seconds"] / by_key[b, cache]["seconds"], 3)

    def peak_ratio(other):
        def peak(name):
            return max(row["peak_bytes"] for row in rows if row["name"] == name)

        return round(peak("bridge") / peak(other), 3)

    other = "safetensors_device_put"
    return {
        "cold_of_raw_read": ratio("bridge", "raw_read", "cold"),
        "warm_of_safetensors_device_put": ratio("bridge", other, "warm"),
        "cold_of_safetensors_device_put": ratio("bridge", other, "cold"),
        **{
            f"{cache}_of_{name}": ratio("bridge", name, cache)
            for name in ("orbax", "orbax_as_fsdp")
            for cache in ("cold", "warm")
        },
        "peak_of_orbax": peak_ratio("orbax"),
        "peak_of_orbax_as_fsdp": peak_ratio("orbax_as_fsdp"),
        "cold_of_transformers": ratio("bridge", "transformers", "cold"),
        "warm_of_transformers": ratio("bridge", "transformers", "warm"),
        "peak_above_destination_mb": round(
            max(row["peak_bytes"] - size for row in rows if row["name"] == "bridge")
            / 1e6,
            1,
        ),
        "two_tensors_mb": round(2 * VOCAB * EMBED * 2 / 1e6, 1),
        "disk_of_an_eighth": round(
            by_key["bridge_eighth", "cold"]["disk_bytes"] / (size / 8), 3
        ),
        "export_speed_of_raw_write": ratio("raw_write", "bridge_export", "none"),
        "conversion_speed_of_raw_copy": ratio("raw_copy", "bridge_conversion", "cold"),
        "conversion_resident_mb": round(
            by_key["bridge_conversion", "cold"]["resident_bytes"] / 1e6, 1
        ),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="holds 3 GB meanwhile")
    parser.add_argument("--runs", type=int, default=5)
    result.add_arguments(parser)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    args = parser.parse_args()
    checkpoint = args.dir / "llama"
    if args.child:
        warm = {"warm": True, "cold": False, "none": None}[args.cache]
        return run_child(args.child, checkpoint, warm)
    packages = ("jax", "numpy", "orbax-checkpoint", "safetensors", "torch")
    packages += ("transformers",)
    conditions = result.begin(args, packages)
    make_checkpoint(checkpoint)
    make_megatron(checkpoint)
    kinds = [(name, cache) for cache in ("cold", "warm") for name in IMPORTS]
    kinds += [(name, "cold") for name in (*HOSTS, *CONVERSIONS)]
    kinds += [(name, "none") for name in EXPORTS]
    found = collections.defaultdict(list)
    for number in range(args.runs):
        for name, cache in kinds:
            found[name, cache].append(run(name, checkpoint, cache))
            line = {"run": number, "name": name, "cache": cache}
            print(json.dumps(line | found[name, cache][-1]), file=sys.stderr)
    rows = [
        {"name": name, "cache": cache, **median(runs)}
        for (name, cache), runs in found.items()
    ]
    size = (checkpoint / "model.safetensors").stat().st_size
    check_cache(rows, size)
    report = {
        "file_bytes": size,
        "runs": args.runs,
        "rows": rows,
        "compared": compare(rows, size),
    }
    fresh(args.dir / "out")
    result.write(args, conditions, report)


if __name__ == "__main__":
    main()
