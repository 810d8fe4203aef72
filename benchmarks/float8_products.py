"""Whether training with products in float8 converges as in bfloat16, on CPUs.

    python benchmarks/float8_products.py [--models 0.9m 5m] [--steps N] [--out FILE]
        [--scratch DIR] [--minutes M]

Byte-level decoders learn the text of `docs/pages`, twice from the same weights and with
the same batches of 2,048 tokens: projections of attention and MLPs in bfloat16, and in
float8 with current scaling (`bridge.models.float8_product`). CPUs compute both with
numbers of those formats, slowly. JSON goes to stdout: the mean loss of the last tenth
of steps, and a held-out loss, of both, and how far apart they are. With `--scratch` and
`--minutes` it stops and saves, and the same command goes on where it stopped; models
that `--out` has already are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import math
import shutil
import sys
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
EVERY = 25
"""Steps between saves."""
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


class OutOfTimeError(Exception):
    """The minutes of this piece are over; what was trained is saved."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a piece of the training has beside the model.

    Attributes:
      steps: Steps of the whole training, which decide the learning rates.
      scratch: Directory of the states between pieces; None to train in one.
      deadline: `time.monotonic()` at which the piece ends.
    """

    steps: int
    scratch: Path | None
    deadline: float


def make_plan(config, product):
    """A plan on one device, in bfloat16."""

    def make(key):
        scan = functools.partial(fsdp.scan, prefetch=1)
        return Decoder(config, rngs=nnx.Rngs(key), scan=scan, product=product)

    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    mesh = fsdp.make_mesh(devices=jax.devices()[:1])
    return fsdp.fully_shard(
        make, mesh, [DecoderLayer], fsdp.FSDPConfig(mp_policy=policy)
    )


def optimizer(steps):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 10, steps, 2e-4)
    return optax.adamw(schedule, weight_decay=0.1)


def opened(plan, tx, folder, digest):
    """State, losses and CPU seconds of the pieces before, or of none."""
    if folder is None or fsdp.latest_step(folder) is None:
        params = fsdp.init_params(plan, jax.random.key(0))
        return fsdp.init_state(plan, tx, params), [], 0.0
    known = fsdp.checkpoint.load_metadata(folder)
    if known["text"] != digest:
        raise ValueError(
            f"{folder} was trained on another text, {known['text']}, than this "
            f"{digest}: docs/pages have changed. Go on at its commit, or remove it."
        )
    state = fsdp.load(folder, fsdp.abstract_state(plan, tx))
    return state, known["losses"], known["cpu_s"]


def train(config, product, piece, folder):
    """The losses of all steps, the held-out loss, parameters, and CPU seconds."""
    data, started = text(), time.process_time()
    learned, rest = data[: -len(data) // 10], data[-len(data) // 10 :]
    digest = hashlib.sha256(data.tobytes()).hexdigest()[:12]
    plan, tx = make_plan(config, product), optimizer(piece.steps)
    step = fsdp.make_train_step(plan, loss_fn, tx)
    state, losses, before = opened(plan, tx, folder, digest)
    random = np.random.default_rng(0)
    for _ in losses:  # The same batches as in one piece.
        rows(learned, random, ROWS)

    def save():
        seconds = before + time.process_time() - started
        known = {"losses": losses, "cpu_s": seconds, "text": digest}
        if folder is not None and fsdp.latest_step(folder) != len(losses):
            fsdp.save(folder, state, metadata=known)
            for old in folder.iterdir():
                if old.name.isdigit() and int(old.name) < len(losses):
                    shutil.rmtree(old)
        return seconds

    while len(losses) < piece.steps:
        state, metrics = step(state, rows(learned, random, ROWS))
        losses.append(float(metrics["loss"]))
        is_over = time.monotonic() > piece.deadline
        if is_over or len(losses) % EVERY == 0:
            save()
        if is_over and len(losses) < piece.steps:
            raise OutOfTimeError(f"{len(losses)} of {piece.steps} steps")
    held_out = rows(rest, np.random.default_rng(1), HELD_OUT)
    evaluate = fsdp.make_eval_step(plan, loss_fn)
    params = sum(int(np.prod(param.shape)) for param in plan.param_plans)
    return losses, float(evaluate(state.params, held_out)["loss"]), params, save()


def run_of(config, product, piece, folder):
    """What training with one product comes to."""
    losses, held_out, params, seconds = train(config, product, piece, folder)
    last = losses[-max(1, piece.steps // 10) :]
    return params, {
        "first_loss": losses[0],
        "last_loss": float(np.mean(last)),
        "held_out_loss": held_out,
        "cpu_s": round(seconds, 1),
        "losses": [round(loss, 4) for loss in losses[:: max(1, piece.steps // 50)]],
    }


def compare(name, piece, found, write):
    """Trains a model with each product that `found` lacks; writes after each."""
    for product in PRODUCTS:
        runs = found.setdefault("runs", {})
        if product in runs:
            continue
        folder = piece.scratch and piece.scratch / f"{name}-{product}"
        config = CONFIGS[name]
        found["params"], runs[product] = run_of(
            config, PRODUCTS[product], piece, folder
        )
        write()
    wanted, narrow = (found["runs"][product] for product in PRODUCTS)
    found["float8_over_bfloat16"] = {
        name: round(narrow[name] / wanted[name], 5)
        for name in ("last_loss", "held_out_loss")
    }
    write()


def main():
    """Trains each model twice, in pieces if there is a scratch directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    result.add_arguments(parser)
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--scratch", type=Path, help="states between pieces; needs --out"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="of this piece; needs --scratch"
    )
    args = parser.parse_args()
    if (args.minutes < math.inf and not args.scratch) or (
        args.scratch and not args.out
    ):
        parser.error("--minutes needs --scratch, and --scratch needs --out.")
    conditions = result.begin(args, PACKAGES)
    report = {"steps": args.steps, "tokens_per_step": ROWS * SEQ, "models": {}}
    if args.scratch:
        known = result.resumed(args, report)
        report = known if known["steps"] == args.steps else report
    piece = Piece(args.steps, args.scratch, time.monotonic() + 60 * args.minutes)
    write = functools.partial(result.write, args, conditions, report, show=False)
    try:
        for name in args.models:
            compare(name, piece, report["models"].setdefault(name, {}), write)
    except OutOfTimeError as reached:
        print(f"{name}: {reached}; the same command goes on.", file=sys.stderr)
    result.write(args, conditions, report)


if __name__ == "__main__":
    main()
