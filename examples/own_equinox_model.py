"""Training of your own equinox model, sharded: a vision transformer on noisy images.

    python examples/own_equinox_model.py --save RUN --steps 100

The model is ordinary equinox. What is new is `fully_shard`, and that the step takes and
returns a state whose leaves are shards.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jaxtyping import Array, Float, Int, PRNGKeyArray

import fsdp_jax as fsdp


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
      save: Directory of the checkpoint.
      steps: Number of updates.
      batch: Images in a batch.
      width: Width of the model.
      layers: Number of layers.
      lr: Learning rate.
    """

    save: Path
    steps: int = 100
    batch: int = 32
    width: int = 64
    layers: int = 4
    lr: float = 1e-2


SIZE, PATCH, CLASSES = 16, 4, 4


class Block(eqx.Module):
    """Layer: attention over patches, and an MLP."""

    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]

    def __init__(self, width: int, key: PRNGKeyArray):
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(4, width, key=first)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=second)
        self.norms = (eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width))

    def __call__(self, x: Float[Array, "patches width"]) -> Array:
        """Returns the patches, transformed."""
        y = jax.vmap(self.norms[0])(x)
        x += self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Classifier(eqx.Module):
    """Vision transformer for one image; `jax.vmap` makes it one for a batch."""

    embed: eqx.nn.Linear
    position: Float[Array, "patches width"]
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, options: Options, key: PRNGKeyArray):
        width, keys = options.width, jax.random.split(key, options.layers + 3)
        self.embed = eqx.nn.Linear(PATCH * PATCH, width, key=keys[0])
        shape = ((SIZE // PATCH) ** 2, width)
        self.position = 0.02 * jax.random.normal(keys[1], shape)
        self.blocks = [Block(width, k) for k in keys[3:]]
        self.head = eqx.nn.Linear(width, CLASSES, key=keys[2])

    def __call__(self, image: Float[Array, "height width"]) -> Float[Array, " classes"]:
        """Returns the logits of the classes."""
        side = SIZE // PATCH
        patches = image.reshape(side, PATCH, side, PATCH).swapaxes(1, 2)
        x = jax.vmap(self.embed)(patches.reshape(side * side, -1)) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=0))


def loss_fn(model: Classifier, batch: dict[str, Array]) -> tuple[Array, dict]:
    """Returns the mean cross entropy of this device's images, and the accuracy."""
    logits = jax.vmap(model)(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


def images(count: int, seed: int) -> dict[str, Int[np.ndarray, ...]]:
    """Makes images of noise with one bright quarter, which is the class."""
    rng = np.random.default_rng(seed)
    image = rng.normal(size=(count, SIZE, SIZE)).astype(np.float32)
    label = rng.integers(0, CLASSES, count).astype(np.int32)
    half = SIZE // 2
    for index, quarter in enumerate(label):
        top, left = divmod(int(quarter), 2)
        image[index, top * half :, left * half :][:half, :half] += 2
    return {"image": image, "label": label}


def train(options: Options) -> list[float]:
    """Trains, saves, and returns the accuracy of each step."""
    mesh = fsdp.make_mesh()
    plan = fsdp.fully_shard(lambda key: Classifier(options, key), mesh, units=[Block])
    print(plan)
    tx = optax.adamw(options.lr)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    step = fsdp.make_train_step(plan, loss_fn, tx, has_aux=True)
    found = []
    for number in range(1, options.steps + 1):
        state, metrics = step(state, images(options.batch, seed=number))
        found.append(float(metrics["aux"]["accuracy"]))
        print(
            f"step {number}  loss {float(metrics['loss']):.4f}  {found[-1]:.0%} right"
        )
    fsdp.save(options.save, state)
    # Any mesh loads it: here each device has an eighth, elsewhere another part.
    again = fsdp.load(options.save, fsdp.abstract_state(plan, tx))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, again.params, state.params))
    return found


if __name__ == "__main__":
    train(tyro.cli(Options))
