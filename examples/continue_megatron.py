"""A run of Megatron-LM goes on in JAX, with its Adam, and returns to Megatron.

    python examples/continue_megatron.py --run RUN --tokens TOKENS.npy --save OUT

RUN is what Megatron's `--save` wrote: `torch_dist`, `fsdp_dtensor`, or legacy
files with a distributed optimizer. Neither Megatron nor torch is needed. OUT is read by
Megatron's `--load`, in the same way.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import tyro
from flax import nnx

import bridge
import fsdp_jax as fsdp
from bridge.megatron import Adam, AdamSettings
from bridge.models import Decoder, DecoderConfig, DecoderLayer


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
      run: Directory of Megatron's checkpoints.
      tokens: File of token ids, one array in numpy's format.
      save: Directory for the checkpoint that Megatron goes on from.
      lr: Learning rate, which a checkpoint with a schedule does not have.
      weight_decay: Weight decay, where the checkpoint has none or a schedule.
      steps: Number of updates.
      batch: Rows of a batch.
      seq: Tokens of a row.
    """

    run: Path
    tokens: Path
    save: Path
    lr: float
    weight_decay: float = 0.1
    steps: int = 100
    batch: int = 8
    seq: int = 256


def plan_model(config: DecoderConfig) -> fsdp.Plan:
    """Plans the model on all devices, a layer a unit."""

    def make_model(key: jax.Array) -> Decoder:
        return Decoder(config, rngs=nnx.Rngs(key), scan=fsdp.scan)

    return fsdp.fully_shard(make_model, fsdp.make_mesh(), units=[DecoderLayer])


def loss_fn(model: Decoder, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean cross entropy of this device's rows."""
    tokens = batch["tokens"]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(tokens[:, :-1]), tokens[:, 1:]
    )
    return losses.mean()


def chosen(settings: AdamSettings, options: Options) -> AdamSettings:
    """Returns the run's settings, with those that it leaves open as options say."""
    for name, reason in settings.open.items():
        print(f"{name} is open in the checkpoint: {reason}")
    given = {"lr": options.lr, "weight_decay": options.weight_decay}
    given |= {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "clip_grad": 1.0, "no_decay": ()}
    opened = {name: x for name, x in given.items() if getattr(settings, name) is None}
    return dataclasses.replace(settings, **opened, open={})


def make_optimizer(settings: AdamSettings) -> optax.GradientTransformation:
    """Returns Adam with the settings of the run."""
    assert settings.no_decay is not None

    def is_decayed(params: Any) -> Any:
        def decide(path: Any, _: Any) -> bool:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return name.removesuffix(".value") not in settings.no_decay

        return jax.tree_util.tree_map_with_path(decide, params)

    adam = optax.adamw(
        settings.lr,
        settings.b1,
        settings.b2,
        settings.eps,
        weight_decay=settings.weight_decay,
        mask=is_decayed,
    )
    if not settings.clip_grad:
        return adam
    return optax.chain(optax.clip_by_global_norm(settings.clip_grad), adam)


def begin(
    plan: fsdp.Plan, adam: Adam, tx: optax.GradientTransformation
) -> fsdp.TrainState:
    """Returns the state that Megatron was in: weights, moments and counts."""
    moments = {"mu": adam.mu, "nu": adam.nu, "count": adam.count}
    opt_state = optax.tree.set(tx.init(adam.params), **moments)
    step = int(adam.count)
    return fsdp.init_state(plan, tx, adam.params, opt_state=opt_state, step=step)


def end(state: fsdp.TrainState, settings: AdamSettings) -> Adam:
    """Returns weights, moments and counts of a state, as Megatron keeps them."""
    opt_state = fsdp.sharding.unpack(state.opt_state)
    found = {name: optax.tree.get(opt_state, name) for name in ("mu", "nu")}
    params = fsdp.sharding.unpack(state.params)
    return Adam(params, **found, count=state.step, settings=settings)


def train(options: Options) -> list[float]:
    """Trains on from where Megatron was, and returns the loss of each step."""
    run = bridge.megatron.open_megatron(options.run)
    config = bridge.megatron.from_args(run.args)
    plan = plan_model(config)
    adam = bridge.megatron.load_megatron_adam(options.run, plan.params)
    settings = chosen(adam.settings, options)
    tx = make_optimizer(settings)
    state, step = begin(plan, adam, tx), fsdp.make_train_step(plan, loss_fn, tx)
    tokens, width = np.load(options.tokens, mmap_mode="r"), options.seq + 1
    rows = tokens[: len(tokens) // width * width].reshape(-1, width).astype(np.int32)
    # Megatron counts samples; its own data would go on behind these.
    seen = run.consumed_samples or 0
    losses = []
    for _ in range(options.steps):
        batch = rows[np.arange(seen, seen + options.batch) % len(rows)]
        state, metrics = step(state, {"tokens": batch})
        seen += options.batch
        losses.append(float(metrics["loss"]))
        print(f"step {int(state.step)}  loss {losses[-1]:.4f}")
    bridge.megatron.save_megatron_adam(
        options.save,
        end(state, settings),
        config,
        consumed_samples=seen,
        flags={"clip_grad": settings.clip_grad},
    )
    return losses


if __name__ == "__main__":
    train(tyro.cli(Options))
