"""Pretraining of your own flax.nnx model on many hosts, with checkpoints that go on.

    srun --kill-on-bad-exit=1 python examples/pretrain.py --tokens TOKENS.npy --save RUN
    fsdp-jax launch --processes 2 -- python examples/pretrain.py ...    # one machine

TOKENS.npy is one array of token ids. Started again with the same command, on any number
of hosts, the run goes on from its newest step, with the batches that would have come.
SIGTERM (SLURM's `--signal`) saves the current step first.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint.checkpoint_managers as policies
import tyro
from flax import nnx

import fsdp_jax as fsdp


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
      tokens: File of token ids, one array in numpy's format.
      save: Directory of the checkpoints, which all hosts see.
      steps: Last step.
      batch: Rows of a global batch.
      seq: Tokens of a row.
      replicas: Replicas of the sharded model: HSDP, one replica a rack, say.
      save_every: Interval of steps to save.
      vocab: Size of the vocabulary.
      width: Width of the model.
      layers: Number of layers.
      lr: Learning rate after a warmup of 10 steps.
    """

    tokens: Path
    save: Path
    steps: int = 1000
    batch: int = 32
    seq: int = 256
    replicas: int = 1
    save_every: int = 100
    vocab: int = 256
    width: int = 256
    layers: int = 4
    lr: float = 3e-4


class Block(nnx.Module):
    """Layer of a transformer; it knows nothing of sharding."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            max(1, width // 64), width, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns activations, `[batch, seq, width]`."""
        mask = nnx.make_causal_mask(x[..., 0])
        x += self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Model(nnx.Module):
    """Language model."""

    def __init__(self, options: Options, rngs: nnx.Rngs):
        width = options.width
        self.embed = nnx.Embed(options.vocab, width, rngs=rngs)
        self.position = nnx.Embed(options.seq, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(options.layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits, `[batch, seq, vocab]`."""
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1])[None])
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def loss_fn(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean cross entropy of this device's rows."""
    tokens = batch["tokens"]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(tokens[:, :-1]), tokens[:, 1:]
    )
    return losses.mean()


def read_batches(options: Options, mesh: jax.sharding.Mesh) -> Any:
    """Returns this host's rows of shuffled batches, without end."""
    tokens = np.load(options.tokens, mmap_mode="r")
    width = options.seq + 1
    rows = [
        {"tokens": tokens[start : start + width].astype(np.int32)}
        for start in range(0, len(tokens) - width + 1, width)
    ]
    shuffled = grain.MapDataset.source(rows).seed(0).shuffle().repeat()
    hosts = fsdp.HostBatches(shuffled, options.batch, fsdp.host_shard(mesh))
    return iter(grain.MapDataset.source(hosts).to_iter_dataset())


def train(options: Options) -> dict[int, float]:
    """Trains, and returns the loss of each step that was done."""
    fsdp.initialize(config=vars(options))  # Joins the job, if there is one.
    mesh = fsdp.make_mesh(dp_outer=options.replicas)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    plan = fsdp.fully_shard(
        lambda key: Model(options, nnx.Rngs(key)),
        mesh,
        units=[Block],
        config=fsdp.FSDPConfig(mp_policy=policy),
    )
    schedule = optax.linear_schedule(0, options.lr, transition_steps=10)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    step = fsdp.make_train_step(plan, loss_fn, tx)
    batches, losses = read_batches(options, mesh), {}
    saved = policies.FixedIntervalPolicy(options.save_every)
    with fsdp.Checkpointer(options.save, save_decision_policy=saved) as checkpointer:
        extras = {"data": batches}
        state = checkpointer.resume(fsdp.abstract_state(plan, tx), extras=extras)
        if state is None:
            params = fsdp.init_params(plan, jax.random.key(0))
            state = fsdp.init_state(plan, tx, params)
        for number in range(int(state.step) + 1, options.steps + 1):
            batch = fsdp.global_batch(mesh, next(batches), options.batch)
            state, metrics = step(state, batch)
            losses[number] = float(metrics["loss"])
            if jax.process_index() == 0:
                print(f"step {number}  loss {losses[number]:.4f}", flush=True)
            checkpointer.save(number, state, extras=extras)
    return losses


if __name__ == "__main__":
    train(tyro.cli(Options))
