"""The trainer's half of a loop of reinforcement learning: GRPO, and its weights sent.

    python examples/rl_loop.py --model DIR --engine HOST:PORT --save TUNED

A rollout engine (vLLM, SGLang, or one of your own) listens on HOST:PORT and accepts two
connections. On the first it writes a line of JSON a step: the answers that it sampled,
`tokens` `[answers, length]` with `mask` of the tokens it chose, and their `rewards`;
answers to one prompt follow each other. On the second it gets the new weights, by
`bridge.handover.receive_weights`. Here the trainer waits for the engine and the engine
for the trainer; with answers that are a step old both would work at once.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx

import bridge
import fsdp_jax as fsdp
from bridge.models import Decoder, DecoderConfig, DecoderLayer


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
      model: Directory of a Hugging Face model.
      engine: Address of the rollout engine, HOST:PORT.
      save: Directory for the tuned model, in Hugging Face's format.
      steps: Number of updates, each with the answers of the newest weights.
      group: Number of answers to each prompt.
      lr: Learning rate.
      dtype: Dtype in which the engine gets the weights.
      timeout: Seconds that the engine may take to answer.
    """

    model: Path
    engine: str
    save: Path
    steps: int = 100
    group: int = 8
    lr: float = 1e-6
    dtype: str = "bfloat16"
    timeout: float = 600.0


def loss_fn(model: Decoder, batch: dict[str, jax.Array]) -> Any:
    """Returns GRPO's loss of this device's answers, each averaged over its tokens."""
    tokens, mask = batch["tokens"], batch["mask"][:, 1:]
    logits = model(tokens[:, :-1])
    log_probs = fsdp.ops.vocab_parallel_log_probs(logits, tokens[:, 1:])
    # The first update after a rollout: the policy that wrote is the one that learns.
    old = jax.lax.stop_gradient(log_probs)
    losses = fsdp.rl.policy_loss(log_probs, old, batch["advantages"], mask=mask)
    lengths = jnp.maximum(mask.sum(axis=1), 1)
    answers = losses.sum(axis=1) / lengths
    likely = fsdp.rl.sequence_log_probs(log_probs, mask)
    return answers.mean(), {"log_prob": likely.mean()}


def make_batch(line: str, options: Options) -> dict[str, Any]:
    """Makes a batch of a line that the engine wrote."""
    rollout = json.loads(line)
    rewards = jnp.asarray(rollout["rewards"], jnp.float32)
    return {
        "tokens": np.asarray(rollout["tokens"], np.int32),
        "mask": np.asarray(rollout["mask"], bool),
        "advantages": fsdp.rl.group_advantages(rewards, options.group),
        "rewards": rewards,
    }


def connect(options: Options) -> socket.socket:
    """Opens a connection to the engine."""
    host, _, port = options.engine.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=options.timeout)


def plan_model(config: DecoderConfig) -> fsdp.Plan:
    """Plans the model on all devices, a layer a unit."""

    def make_model(key: jax.Array) -> Decoder:
        return Decoder(config, rngs=nnx.Rngs(key), scan=fsdp.scan)

    return fsdp.fully_shard(make_model, fsdp.make_mesh(), units=[DecoderLayer])


def train(options: Options) -> list[dict[str, float]]:
    """Trains, saves the model, and returns the metrics of each step."""
    config = bridge.from_hf_config(options.model)
    plan = plan_model(config)
    params = bridge.load_hf(options.model, plan.params)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(options.lr, weight_decay=0)
    )
    state = fsdp.init_state(plan, tx, params)
    step = fsdp.make_train_step(plan, loss_fn, tx, has_aux=True)
    metrics = []
    with connect(options) as answers, connect(options) as weights:
        lines = answers.makefile("r", encoding="utf-8")
        for number in range(1, options.steps + 1):
            batch = make_batch(lines.readline(), options)
            reward = float(batch.pop("rewards").mean())
            state, measured = step(state, batch)
            sent = bridge.handover.send_weights(
                weights,
                state.params,
                config,
                dtype=options.dtype,
                metadata={"step": number, "last": number == options.steps},
            )
            log_prob = float(measured["aux"]["log_prob"])
            metrics.append({"step": number, "reward": reward, "log_prob": log_prob})
            assert sent is not None
            print(json.dumps(metrics[-1] | {"weights": sent.sha256[:12]}), flush=True)
    bridge.save_hf(options.save, state.params, config)
    return metrics


if __name__ == "__main__":
    train(tyro.cli(Options))
