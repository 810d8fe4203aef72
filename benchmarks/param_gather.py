"""What the demo's model learns from weights gathered in eight bits.

    python benchmarks/param_gather.py [--steps 200] [--devices 4] [--out FILE]

A Llama of the demo's sizes trains on the demo's text, in bfloat16, on simulated CPU
devices: its weights gathered as bfloat16, as float8 and as MXFP8. Each does so three
times, with other batches from another start, the same for all formats: 200 steps in, a
loss still falls by the luck of the batches. JSON goes to stdout: the losses, and how
far the mean of the last 20, over all three, is from bfloat16's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import result
from flax import nnx

import fsdp_jax as fsdp
from bridge.models import Decoder, DecoderConfig, DecoderLayer
from fsdp_jax.cli._tokens import read_tokens
from fsdp_jax.cli.commands._demo import _text_files

CONFIG = DecoderConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
)
FORMATS = {
    "bfloat16": None,
    "float8": fsdp.sharding.Float8Gather(min_elements=1024),
    "mxfp8": fsdp.sharding.MXFP8Gather(min_elements=1024),
}
ROWS, SEQ, LAST, SEEDS = 16, 64, 20, (0, 1, 2)


def batches(seed):
    """Rows of the demo's text, in an order of their own."""
    files = [Path(file) for file in _text_files()]
    tokens = read_tokens(files, "bytes", None, CONFIG.vocab_size)[:].astype(np.int32)
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(tokens) - SEQ - 1, ROWS)
        yield np.stack([tokens[s : s + SEQ + 1] for s in starts])


def loss_fn(model, tokens):
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def train(kind, steps, seed):
    """The losses, and what is gathered in fewer bits."""
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=jnp.bfloat16, param_gather=FORMATS[kind]
    )
    plan = fsdp.fully_shard(
        lambda key: Decoder(CONFIG, rngs=nnx.Rngs(key), scan=fsdp.scan),
        fsdp.make_mesh(),
        [DecoderLayer],
        fsdp.FSDPConfig(mp_policy=policy),
    )
    tx = optax.adamw(1e-3)
    step = fsdp.make_train_step(plan, loss_fn, tx)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(seed)))
    losses, given = [], batches(seed)
    for _ in range(steps):
        state, metrics = step(state, next(given))
        losses.append(float(metrics["loss"]))
    return losses, [param.name for param in plan.param_plans if param.gather]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--devices", type=int, default=4, help="simulated")
    result.add_arguments(parser)
    args = parser.parse_args()
    conditions = result.begin(args, ("jax", "flax"))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    found = {
        kind: [train(kind, args.steps, seed) for seed in SEEDS] for kind in FORMATS
    }
    last = {
        kind: [float(np.mean(losses[-LAST:])) for losses, _ in runs]
        for kind, runs in found.items()
    }
    report = {
        "rows": ROWS,
        "seq": SEQ,
        "steps": args.steps,
        "formats": {
            kind: {
                "gathered_in_fewer_bits": runs[0][1],
                "last_losses": [round(loss, 5) for loss in last[kind]],
                "off_by": round(np.mean(last[kind]) / np.mean(last["bfloat16"]) - 1, 5),
                "losses_of_the_first": [round(loss, 4) for loss in runs[0][0]],
            }
            for kind, runs in found.items()
        },
    }
    result.write(args, conditions, report)


if __name__ == "__main__":
    main()
