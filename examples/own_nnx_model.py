"""Training of your own flax.nnx model, sharded: images, dropout and BatchNorm.

    python examples/own_nnx_model.py --save RUN --steps 200 --replicas 2

The model is ordinary nnx. Its running statistics and dropout keys are no parameters:
the state keeps them in `model_state`, and the loss writes to the model as on one
device. The run is evaluated on held-out images, and its best step is kept.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

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
      save: Directory of the checkpoints.
      steps: Number of updates.
      batch: Images in a batch.
      width: Channels of the model.
      blocks: Number of blocks.
      dropout: Share of the features that dropout drops.
      replicas: Replicas of the sharded model.
      eval_every: Interval of steps at which held-out images are evaluated and saved.
      lr: Learning rate.
    """

    save: Path
    steps: int = 200
    batch: int = 64
    width: int = 64
    blocks: int = 4
    dropout: float = 0.1
    replicas: int = 1
    eval_every: int = 20
    lr: float = 3e-3


SIZE, CLASSES = 8, 4
Batch = dict[str, jax.Array]


class Block(nnx.Module):
    """Residual block: two convolutions, BatchNorm and dropout."""

    def __init__(self, options: Options, rngs: nnx.Rngs):
        width = options.width
        self.convolutions = nnx.List(
            [nnx.Conv(width, width, (3, 3), rngs=rngs) for _ in range(2)]
        )
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(options.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns features, `[batch, height, width, channels]`."""
        first, second = self.convolutions
        return x + second(self.dropout(nnx.relu(self.norm(first(x)))))


class Classifier(nnx.Module):
    """Residual network."""

    def __init__(self, options: Options, rngs: nnx.Rngs):
        self.stem = nnx.Conv(1, options.width, (3, 3), rngs=rngs)
        self.blocks = nnx.List([Block(options, rngs) for _ in range(options.blocks)])
        self.head = nnx.Linear(options.width, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the logits of the classes, `[batch, classes]`."""
        x = self.stem(images[..., None])
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


def loss_fn(model: Classifier, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the mean cross entropy of this device's images, and the accuracy."""
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


def held_out_loss(model: Classifier, batch: Batch) -> tuple[jax.Array, dict]:
    """Returns the same without dropout, by the running statistics."""
    model.eval()
    return loss_fn(model, batch)


def images(count: int, seed: int) -> dict[str, np.ndarray]:
    """Makes images of noise with a bar, whose direction is the class."""
    rng = np.random.default_rng(seed)
    image = rng.normal(size=(count, SIZE, SIZE)).astype(np.float32)
    label = rng.integers(0, CLASSES, count).astype(np.int32)
    at = np.arange(SIZE)
    bars = np.zeros((CLASSES, SIZE, SIZE), np.float32)
    for kind, place in enumerate(((3, at), (at, 3), (at, at), (at, at[::-1]))):
        bars[kind][place] = 3.0
    return {"image": image + bars[label], "label": label}


def train(options: Options) -> dict[int, float]:
    """Trains, and returns the accuracy on held-out images after some of the steps."""
    mesh = fsdp.make_mesh(dp_outer=options.replicas)
    plan = fsdp.fully_shard(
        lambda key: Classifier(options, nnx.Rngs(key)), mesh, units=[Block]
    )
    tx = optax.adamw(options.lr)
    step = fsdp.make_train_step(plan, loss_fn, tx, has_aux=True)
    evaluate = fsdp.make_eval_step(plan, held_out_loss, has_aux=True)
    held_out, found = images(4 * options.batch, seed=0), {}
    best = fsdp.checkpoint.KeepBest(options.save, "held_out_loss", n=1)
    with fsdp.Checkpointer(
        options.save,
        save_decision_policy=policies.FixedIntervalPolicy(options.eval_every),
        preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(1), best]),
    ) as checkpointer:
        state = checkpointer.resume(fsdp.abstract_state(plan, tx))
        if state is None:
            params = fsdp.init_params(plan, jax.random.key(0))
            state = fsdp.init_state(plan, tx, params)
        for number in range(int(state.step) + 1, options.steps + 1):
            state, metrics = step(state, images(options.batch, seed=number))
            metadata = {}
            if number % options.eval_every == 0:
                given = (state.params, held_out)
                measured = evaluate(*given, model_state=state.model_state)
                metadata["held_out_loss"] = float(measured["loss"])
                found[number] = float(jnp.mean(measured["aux"]["accuracy"]))
                loss = float(metrics["loss"])
                print(f"step {number}  loss {loss:.4f}  {found[number]:.0%} right")
            checkpointer.save(number, state, metadata=metadata)
    return found


if __name__ == "__main__":
    train(tyro.cli(Options))
