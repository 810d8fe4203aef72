"""What one GPU does with the reference decoder, beside the planner and PyTorch FSDP2.

    python benchmarks/gpu_check.py [--devices N] [--out FILE]   GPUs, under 15 minutes
    python benchmarks/gpu_check.py --rehearse       a tiny model, on any machine

A decoder of 1.2B parameters (Llama 3.2's sizes), bfloat16, sequence 4,096, cuDNN's
attention, full recompute, AdamW: the median step, tokens a second, model FLOPs
utilization with attention counted as a square and as a triangle, and the peak of memory
beside what the planner predicts; then the same with the optimizer state on the host,
and with weights gathered in eight bits; and experts' products beside jax's own;
attention kernels, how fast and how far from float32; and whether XLA's watchdog ends a
process whose program waits for ever. Where torch sees the GPU, transformers' model of
the same config trains under FSDP2 beside it. JSON goes to stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import time

import gpu_attention
import jax
import jax.numpy as jnp
import numpy as np
import optax
import result
from flax import nnx

import fsdp_jax as fsdp
from bridge.models import Decoder, DecoderConfig, DecoderLayer, grouped_matmul
from fsdp_jax.planner._gpu import GPUS
from fsdp_jax.planner._memory import predict_memory
from fsdp_jax.training._memory_check import compiled_bytes, memory_alarms

LLAMA_1B = DecoderConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    tie_word_embeddings=True,
)
TINY = DecoderConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@dataclasses.dataclass(frozen=True)
class Run:
    """What is trained: the sizes of a batch, and how many steps are timed.

    Beside it, for products of rows with their group's matrix: rows, groups, embed,
    width; and the seconds that a program waits for the watchdog to end it.
    """

    config: DecoderConfig
    rows: int
    seq: int
    steps: int
    grouped: tuple[int, int, int, int]
    hang: int


FULL = Run(LLAMA_1B, 4, seq=4096, steps=20, grouped=(32768, 8, 2048, 2048), hang=120)
REHEARSAL = Run(TINY, rows=2, seq=32, steps=3, grouped=(512, 4, 16, 32), hang=1)


PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax"),
    *("optax", "torch", "transformers"),
)

VARIANTS = {
    "offload": {"offload": fsdp.OffloadPolicy()},
    "float8_gather": {"param_gather": fsdp.sharding.Float8Gather()},
    "mxfp8_gather": {"param_gather": fsdp.sharding.MXFP8Gather()},
}
"""What else is timed: on one GPU nothing is communicated, so that a gather's variant
shows that it costs nothing there; give --devices to see what it saves."""


def make_plan(config, count=1, param_gather=None, offload=None):
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=jnp.bfloat16,
        grad_comm_dtype=jnp.bfloat16,
        param_gather=param_gather,
    )

    def make(key):
        scan = functools.partial(fsdp.scan, prefetch=1, unroll=2)
        return Decoder(config, rngs=nnx.Rngs(key), scan=scan)

    return fsdp.fully_shard(
        make,
        fsdp.make_mesh(devices=jax.devices()[:count]),
        [DecoderLayer],
        fsdp.FSDPConfig(
            mp_policy=policy,
            remat_policy=jax.checkpoint_policies.nothing_saveable,
            offload=offload,
        ),
    )


def loss_fn(model, tokens):
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def measure_jax(run, count=1, **options):
    plan = make_plan(run.config, count, **options)
    tx = optax.adamw(3e-4, weight_decay=0.1)
    step = fsdp.make_train_step(plan, loss_fn, tx)
    rng = np.random.default_rng(0)
    shape = (run.rows * count, run.seq + 1)
    tokens = rng.integers(0, run.config.vocab_size, shape, dtype=np.int32)
    like = fsdp.abstract_state(plan, tx)
    started = time.perf_counter()
    compiled = step.lower(like, tokens).compile()
    compile_seconds = time.perf_counter() - started
    traced = step.jitted.trace(like, tokens).jaxpr
    predicted = predict_memory(plan, like, tokens, traced)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    seconds, losses = [], []
    for _ in range(3 + run.steps):
        started = time.perf_counter()
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))  # Waits for the step.
        seconds.append(time.perf_counter() - started)
    assigned = compiled_bytes(compiled)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    median = statistics.median(seconds[3:])
    return {
        "median_step_s": median,
        "steps_s": seconds[3:],
        "compile_s": compile_seconds,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        **speeds(plan, run, median),
        "memory_alarms": list(memory_alarms(compiled, memory_of(jax.devices()[0]))),
        "memory": {
            "peak_in_use": peak,
            "assigned_by_xla": assigned,
            "predicted": dataclasses.asdict(predicted) | {"total": predicted.total},
            "predicted_of_assigned": round(predicted.total / assigned, 4),
            "predicted_of_peak": peak and round(predicted.total / peak, 4),
        },
    }


def memory_of(device):
    """Bytes of a device; where it does not say, those of an H200."""
    return (device.memory_stats() or {}).get("bytes_limit") or GPUS["h200"].memory


def speeds(plan, run, seconds):
    """Tokens a second, and both ways in which people count the work of a token."""
    config = run.config
    weights = sum(
        int(np.prod(param.shape))
        for param in plan.param_plans
        if len(param.shape) - param.num_stacked > 1
    )
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size  # looked up, not multiplied
    width = config.num_attention_heads * config.head_dim
    square = 12 * config.num_hidden_layers * width * run.seq
    tokens = run.rows * run.seq
    peak = GPUS["h200"].cost.peak_flops
    return {
        "tokens_per_s": tokens / seconds,
        "mfu_attention_square": tokens * (6 * weights + square) / seconds / peak,
        "mfu_attention_causal": tokens * (6 * weights + square / 2) / seconds / peak,
    }


FSDP2 = """
import json, statistics, sys, time, torch, torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
sizes, rows, seq, steps = json.loads(sys.argv[1])
cuda = torch.cuda.is_available()
device = "cuda" if cuda else "cpu"
store = dist.HashStore()
dist.init_process_group("nccl" if cuda else "gloo", rank=0, world_size=1, store=store)
torch.manual_seed(0)
config = LlamaConfig(**sizes, attn_implementation="sdpa", use_cache=False)
with torch.device(device):
    model = LlamaForCausalLM(config)
model.gradient_checkpointing_enable()
policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
for layer in model.model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
tx = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=cuda)
tokens = torch.randint(config.vocab_size, (rows, seq), device=device)
seconds = []
for _ in range(3 + steps):
    start = time.perf_counter()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    tx.step()
    tx.zero_grad()
    float(loss)
    seconds.append(time.perf_counter() - start)
peak = torch.cuda.max_memory_allocated() if cuda else None
print(json.dumps({"median_step_s": statistics.median(seconds[3:]),
                  "peak_in_use": peak, "torch": torch.__version__}))
dist.destroy_process_group()
"""


def measure_fsdp2(run):
    """The same model in PyTorch, in a process of its own; or why not."""
    config = run.config
    sizes = {
        name: getattr(config, name)
        for name in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "num_key_value_heads", "head_dim"),
            "tie_word_embeddings",
        )
    }
    arguments = json.dumps([sizes, run.rows, run.seq, run.steps])
    done = subprocess.run(
        [sys.executable, "-c", FSDP2, arguments], capture_output=True, text=True
    )
    if done.returncode:
        return {"not_run": done.stderr.strip().splitlines()[-1:]}
    return json.loads(done.stdout.splitlines()[-1])


def measure_experts(run):
    """Products of sorted rows with their group's matrix, and how far apart they are."""
    rows, groups, embed, width = run.grouped
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, embed), jnp.bfloat16)
    kernel = jax.random.normal(keys[1], (groups, embed, width), jnp.bfloat16)
    # As tokens choose: some groups have many rows, one has none.
    ends = jnp.sort(jax.random.randint(keys[2], (groups - 2,), 0, rows))
    ends = jnp.array([0, *ends.tolist(), rows])
    sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)

    def of(product):
        def loss(x, kernel):
            made = product(x, kernel, sizes).astype(jnp.float32)
            return jnp.square(made).mean(), made

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

    found, results = {}, {}
    for name, product in (
        ("ragged_dot", jax.lax.ragged_dot),
        ("grouped_matmul", grouped_matmul),
    ):
        run_once, seconds = of(product), []
        for _ in range(run.steps + 1):
            start = time.perf_counter()
            results[name] = jax.block_until_ready(run_once(x, kernel))
            seconds.append(time.perf_counter() - start)
        found[f"{name}_median_s"] = statistics.median(seconds[1:])
    leaves = [jax.tree.leaves(results[name]) for name in results]
    found["worst_difference"] = max(
        float(jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.linalg.norm(a))
        for a, b in zip(*leaves, strict=True)
    )
    return {"rows_groups_embed_width": run.grouped, **found}


WATCHDOG = 10
"""Seconds that an execution may take in `hang`."""


def hang(seconds):
    """Waits within a program, as a rank does whose peer is alive but stuck."""

    def wait(x):
        time.sleep(seconds)
        return x

    @functools.partial(
        jax.jit,
        compiler_options={"xla_gpu_execution_terminate_timeout": f"{WATCHDOG}s"},
    )
    def program(x):
        return jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), x + 1)

    jax.block_until_ready(program(jnp.float32(0)))


def measure_watchdog(run):
    """Whether XLA ends a process whose execution takes too long."""
    started = time.perf_counter()
    command = [sys.executable, __file__, "--hang", str(run.hang)]
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    return {
        "watchdog_s": WATCHDOG,
        "wait_s": run.hang,
        "process_s": round(seconds, 1),
        "status": done.returncode,
        # It is aborted, and not after it had waited.
        "ended_by_watchdog": done.returncode < 0 and seconds < run.hang,
        "said": done.stderr.strip().splitlines()[-3:],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    result.add_arguments(parser)
    parser.add_argument("--rehearse", action="store_true", help="a tiny model")
    parser.add_argument("--devices", type=int, default=1, help="for fsdp_jax alone")
    parser.add_argument("--hang", type=int, help="wait so many seconds in a program")
    args = parser.parse_args()
    if args.hang is not None:
        hang(args.hang)
        return
    args.force |= args.rehearse  # which measures nothing
    conditions = result.begin(args, PACKAGES)
    run = REHEARSAL if args.rehearse else FULL
    # PyTorch first, as jax keeps what memory it once had.
    fsdp2 = measure_fsdp2(run)
    device = jax.devices()[0]
    if device.platform == "cpu" and not args.rehearse:
        sys.exit("gpu_check.py measures a GPU, and jax sees none: try --rehearse.")
    ours = measure_jax(run, args.devices)
    report = {
        "device": device.device_kind,
        "model": dataclasses.asdict(run.config),
        "rows": run.rows,
        "seq": run.seq,
        "devices": args.devices,
        "fsdp_jax": ours,
        "variants": {
            name: measure_jax(run, args.devices, **options)
            for name, options in VARIANTS.items()
        },
        "experts": measure_experts(run),
        "attention": gpu_attention.measure_attention(
            gpu_attention.REHEARSAL if args.rehearse else gpu_attention.FULL
        ),
        "watchdog": measure_watchdog(run),
        "fsdp2": fsdp2,
    }
    if "median_step_s" in fsdp2 and args.devices == 1:
        faster = fsdp2["median_step_s"] / ours["median_step_s"]
        report["faster_than_fsdp2"] = round(faster, 3)
    result.write(args, conditions, report)


if __name__ == "__main__":
    main()
