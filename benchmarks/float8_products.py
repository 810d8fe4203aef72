"""Whether training with products in float8 converges as in bfloat16, on CPUs.

    python benchmarks/float8_products.py [--models 0.9m 5m] [--steps N] [--out FILE]

Byte-level decoders learn the text of `docs/pages`, twice from the same weights and with
the same batches of 2,048 tokens: projections of attention and MLPs in bfloat16, and in
float8 with current scaling (`bridge.models.float8_product`). CPUs compute both with
numbers of those formats, slowly. JSON goes to stdout: the mean loss of the last tenth
of steps, and a held-out loss, of both, and how far apart they are.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import result
from flax import nnx

import fsdp_jax as fsdp
from bridge.models import Decoder, DecoderConfig, DecoderLayer, float8_product
from bridge.models._float8 import plain_product

SMALL = DecoderConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
CONFIGS = {
    "0.9m": SMALL,
    "5m": dataclasses.replace(
        SMALL, hidden_size=256, intermediate_size=704, num_hidden_layers=7
    ),
}
ROWS, SEQ, HELD_OUT = 16, 128, 64
PRODUCTS = {"bfloat16": plain_product, "float8": float8_product}
PACKAGES = ("jax", "jaxlib", "flax", "optax")


def text():
    """The bytes of the pages, by name."""
    pages = sorted((Path(__file__).parents[1] / "docs/pages").rglob("*.md"))
    return np.frombuffer(b"\n".join(page.read_bytes() for page in pages), np.uint8)


def rows(data, random, count):
    """Rows of text from random places."""
    starts = random.integers(0, len(data) - SEQ - 1, count)
    return np.stack([data[start : start + SEQ + 1] for start in starts]).astype(
        np.int32
    )


def loss_fn(model, tokens):
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def train(config, product, steps):
    """The losses of all steps, the held-out loss, and the number of parameters."""
    data = text()
    learned, rest = data[: -len(data) // 10], data[-len(data) // 10 :]

    def make(key):
        scan = functools.partial(fsdp.scan, prefetch=1)
        return Decoder(config, rngs=nnx.Rngs(key), scan=scan, product=product)

    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    mesh = fsdp.make_mesh(devices=jax.devices()[:1])
    plan = fsdp.fully_shard(
        make, mesh, [DecoderLayer], fsdp.FSDPConfig(mp_policy=policy)
    )
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 10, steps, 2e-4)
    tx = optax.adamw(schedule, weight_decay=0.1)
    step = fsdp.make_train_step(plan, loss_fn, tx)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    random, losses = np.random.default_rng(0), []
    for _ in range(steps):
        state, metrics = step(state, rows(learned, random, ROWS))
        losses.append(float(metrics["loss"]))
    held_out = rows(rest, np.random.default_rng(1), HELD_OUT)
    evaluate = fsdp.make_eval_step(plan, loss_fn)
    return losses, float(evaluate(state.params, held_out)["loss"]), plan


def compare(config, steps):
    """What both products come to on one model."""
    runs, params = {}, 0
    for name, product in PRODUCTS.items():
        started = time.process_time()
        losses, held_out, plan = train(config, product, steps)
        last = losses[-max(1, steps // 10) :]
        runs[name] = {
            "first_loss": losses[0],
            "last_loss": float(np.mean(last)),
            "held_out_loss": held_out,
            "cpu_s": round(time.process_time() - started, 1),
            "losses": [round(loss, 4) for loss in losses[:: max(1, steps // 50)]],
        }
        params = sum(int(np.prod(param.shape)) for param in plan.param_plans)
    wanted, found = runs["bfloat16"], runs["float8"]
    return {
        "params": params,
        "runs": runs,
        "float8_over_bfloat16": {
            name: round(found[name] / wanted[name], 5)
            for name in ("last_loss", "held_out_loss")
        },
    }


def main():
    """Trains each model twice; writes the result after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    result.add_arguments(parser)
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    conditions = result.begin(args, PACKAGES)
    report = {"steps": args.steps, "tokens_per_step": ROWS * SEQ, "models": {}}
    for name in args.models:
        report["models"][name] = compare(CONFIGS[name], args.steps)
        result.write(args, conditions, report)


if __name__ == "__main__":
    main()
