"""The demo's model learns from weights in eight bits what it learns from bfloat16."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fsdp_jax as fsdp
from bridge.models import Decoder, DecoderConfig, DecoderLayer
from fsdp_jax.cli._demo import _text_files
from fsdp_jax.cli._tokens import read_tokens

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
    "float8": fsdp.Float8Gather(min_elements=1024),
    "mxfp8": fsdp.MXFP8Gather(min_elements=1024),
}


def batches(rows, seq):
    """Rows of the demo's text, in an order of their own."""
    files = [Path(file) for file in _text_files()]
    tokens = read_tokens(files, "bytes", None, 256).astype(np.int32)
    random = np.random.default_rng(0)
    while True:
        starts = random.integers(0, len(tokens) - seq - 1, rows)
        yield np.stack([tokens[s : s + seq + 1] for s in starts])


def loss_fn(model, tokens):
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def losses_of(kind, steps, seq):
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=jnp.bfloat16, param_gather=FORMATS[kind]
    )
    plan = fsdp.fully_shard(
        lambda key: Decoder(CONFIG, rngs=nnx.Rngs(key), scan=fsdp.scan),
        fsdp.make_mesh(),
        [DecoderLayer],
        fsdp.FSDPConfig(mp_policy=policy),
    )
    tx = optax.adamw(3e-3)
    step = fsdp.make_train_step(plan, loss_fn, tx)
    state = fsdp.init(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    losses, given = [], batches(8, seq)
    for _ in range(steps):
        state, metrics = step(state, next(given))
        losses.append(float(metrics["loss"]))
    return np.array(losses)


@functools.cache
def bfloat16(steps, seq):
    return losses_of("bfloat16", steps, seq)


def compare(kind, steps, seq, last):
    want, got = bfloat16(steps, seq), losses_of(kind, steps, seq)
    assert want[-last:].mean() < 0.9 * want[0], "bfloat16 learns nothing"
    assert (got != want).any(), "nothing was rounded"
    assert got[-last:].mean() == pytest.approx(want[-last:].mean(), rel=0.01)


def test_a_few_steps_of_mxfp8_follow_bfloat16():
    compare("mxfp8", steps=12, seq=32, last=4)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["float8", "mxfp8"])
def test_the_loss_after_200_steps_is_within_1_percent(kind):
    compare(kind, steps=200, seq=64, last=20)
