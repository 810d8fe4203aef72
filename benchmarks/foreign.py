"""Models that others would write: how much of a step waits, and what it needs.

    python benchmarks/foreign.py [--gpus 8] [--layers 10] [--models nnx linen ...]

Decoders of one size, written as users of flax.nnx, flax.linen and equinox write them: a
Python loop over layers, attention of the framework itself, nothing that knows of
sharding. Each is compiled for H200s without one (`fsdp.estimate_step`), with gathers
one unit ahead (`FSDPConfig(prefetch=1)`, the default) and in the order that XLA chooses
(`prefetch=0`); beside them the reference decoder, whose layers `fsdp.scan` runs.
"""

from __future__ import annotations

import argparse
import functools
import logging
import time

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import result
from flax import nnx

import bridge
import fsdp_jax as fsdp
from bridge.models import Decoder, DecoderLayer

VOCAB, WIDTH, HIDDEN, HEADS, SEQ = 32_768, 2_048, 8_192, 32, 2_048
TX = optax.adamw(3e-4)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.norm, self.norm_mlp = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, use_bias=False, rngs=rngs
        )
        self.gate, self.up = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN)
        self.down = linear(HIDDEN, WIDTH)

    def __call__(self, x):
        x = x + self.attention(self.norm(x), mask=causal(x.shape[1]))
        y = self.norm_mlp(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class NnxDecoder(nnx.Module):
    def __init__(self, layers, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([NnxBlock(rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, use_bias=False)
        attention = nn.MultiHeadDotProductAttention(HEADS, use_bias=False)
        y = nn.RMSNorm()(x)
        x = x + attention(y, y, mask=causal(x.shape[1]))
        y = nn.RMSNorm()(x)
        return x + dense(WIDTH)(jax.nn.silu(dense(HIDDEN)(y)) * dense(HIDDEN)(y))


class LinenDecoder(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCAB, WIDTH)
        x = embed(tokens)
        for _ in range(self.layers):
            x = LinenBlock()(x)
        return embed.attend(nn.RMSNorm()(x))


class EqxBlock(eqx.Module):
    norms: list
    attention: eqx.nn.MultiheadAttention
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        linear = functools.partial(eqx.nn.Linear, use_bias=False)
        self.norms = [eqx.nn.RMSNorm(WIDTH, use_bias=False) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.gate = linear(WIDTH, HIDDEN, key=keys[1])
        self.up = linear(WIDTH, HIDDEN, key=keys[2])
        self.down = linear(HIDDEN, WIDTH, key=keys[3])

    def __call__(self, x):
        """One sequence, `[seq, width]`, as equinox has it."""
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=causal(len(x))[0, 0])
        y = jax.vmap(self.norms[1])(x)
        hidden = jax.nn.silu(jax.vmap(self.gate)(y)) * jax.vmap(self.up)(y)
        return x + jax.vmap(self.down)(hidden)


class EqxDecoder(eqx.Module):
    embed: eqx.nn.Embedding
    layers: list
    norm: eqx.nn.RMSNorm

    def __init__(self, layers, key):
        keys = jax.random.split(key, layers + 1)
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[-1])
        self.layers = [EqxBlock(key) for key in keys[:-1]]
        self.norm = eqx.nn.RMSNorm(WIDTH, use_bias=False)

    def __call__(self, tokens):
        x = jax.vmap(jax.vmap(self.embed))(tokens)
        for layer in self.layers:
            x = jax.vmap(layer)(x)
        return jax.vmap(jax.vmap(self.norm))(x) @ self.embed.weight.T


def causal(seq):
    return jnp.tril(jnp.ones((1, 1, seq, seq), bool))


def cross_entropy(logits, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), tokens[:, 1:]
    )
    return losses.mean()


def of_model(model, tokens):
    return cross_entropy(model(tokens[:, :-1]), tokens)


def nnx_form(layers):
    return lambda key: NnxDecoder(layers, nnx.Rngs(key)), [NnxBlock], of_model


def linen_form(layers):
    model, tokens = LinenDecoder(layers), jnp.zeros((1, SEQ), jnp.int32)

    def loss(params, batch):
        return cross_entropy(model.apply(params, batch[:, :-1]), batch)

    return lambda key: model.init(key, tokens), ["params.LinenBlock_*"], loss


def equinox_form(layers):
    return lambda key: EqxDecoder(layers, key), [EqxBlock], of_model


def reference_form(layers):
    config = bridge.models.DecoderConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=WIDTH // HEADS,
        max_position_embeddings=SEQ,
        tie_word_embeddings=True,
    )
    scan = functools.partial(fsdp.scan, prefetch=1)

    def make_model(key):
        return Decoder(config, rngs=nnx.Rngs(key), scan=scan)

    return make_model, [DecoderLayer], of_model


FORMS = {
    "nnx": nnx_form,
    "linen": linen_form,
    "equinox": equinox_form,
    "reference": reference_form,
}


def measure(name, layers, gpus, prefetch):
    make_model, units, loss = FORMS[name](layers)
    config = fsdp.FSDPConfig(
        prefetch=prefetch,
        mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16),
        remat_policy=jax.checkpoint_policies.nothing_saveable,
    )
    mesh = fsdp.make_mesh(devices=jax.devices()[:1])
    plan = fsdp.fully_shard(make_model, mesh, units=units, config=config)
    tokens = jax.ShapeDtypeStruct((gpus, SEQ + 1), jnp.int32)
    started = time.perf_counter()
    found = fsdp.estimate_step(plan, loss, TX, tokens, gpu="h200", gpus=gpus)
    return {
        "model": name,
        "prefetch": prefetch,
        "step_ms": round(1e3 * found.timeline.seconds, 2),
        "exposed_of_step": round(found.exposed, 4),
        "compiled_gb": round(found.compiled_bytes / 1e9, 3),
        "predicted_gb": round(found.memory.total / 1e9, 3),
        "guided": found.guided,
        "compile_s": round(time.perf_counter() - started, 1),
    }


def compared(rows):
    """What the order is worth: of each model with it, against the same without."""
    by_name = {(row["model"], row["prefetch"]): row for row in rows}
    found = {}
    for (name, prefetch), row in by_name.items():
        if prefetch and (left := by_name.get((name, 0))):
            found[name] = {
                "faster": round(left["step_ms"] / row["step_ms"], 4),
                "gb_less": round(left["compiled_gb"] - row["compiled_gb"], 3),
                "exposed_of_step": row["exposed_of_step"],
                "exposed_without": left["exposed_of_step"],
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--models", nargs="+", choices=FORMS, default=[*FORMS])
    result.add_arguments(parser)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    jax.config.update("jax_platforms", "cpu")
    conditions = result.begin(args, ("jax", "flax", "equinox"))
    rows = []
    for name in args.models:
        for prefetch in (1,) if name == "reference" else (0, 1):
            rows.append(measure(name, args.layers, args.gpus, prefetch))
    sizes = {"gpus": args.gpus, "layers": args.layers, "width": WIDTH, "seq": SEQ}
    result.write(args, conditions, sizes | {"rows": rows, "compared": compared(rows)})


if __name__ == "__main__":
    main()
