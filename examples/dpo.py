"""Direct preference optimization (DPO) of a Hugging Face model, fully sharded.

    python examples/dpo.py --model DIR --pairs PAIRS.jsonl --save TUNED

Each line of PAIRS.jsonl has a `prompt`, a `chosen` answer and a `rejected` one. The
log-probabilities of the reference model, which is the model before training, are
computed once; they become a column of the data.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import tokenizers
import tyro
from flax import nnx

import bridge
import fsdp_jax as fsdp
from bridge.models import Decoder, DecoderConfig, DecoderLayer

Columns = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
      model: Directory with config.json, tokenizer.json and safetensors files.
      pairs: Pairs of answers, one JSON object a line.
      save: Directory for the tuned model, in Hugging Face's format.
      steps: Number of updates.
      batch: Pairs in a batch.
      seq: Maximum number of tokens of a prompt with its answer; more are cut off.
      lr: Learning rate, which decays linearly to 0.
      beta: Strength of the pull to the reference model.
      seed: Seed of the order of the pairs.
      eos: Token that ends an answer.
    """

    model: Path
    pairs: Path
    save: Path
    steps: int = 100
    batch: int = 8
    seq: int = 256
    lr: float = 1e-6
    beta: float = 0.1
    seed: int = 0
    eos: str = "</s>"


def read_pairs(options: Options) -> Columns:
    """Returns tokens, `[pairs, 2, seq + 1]`, and the mask of targets in answers."""
    tokenizer = tokenizers.Tokenizer.from_file(str(options.model / "tokenizer.json"))
    eos = tokenizer.token_to_id(options.eos)
    if eos is None:
        raise ValueError(f"--eos {options.eos}: the tokenizer has no such token.")
    lines = options.pairs.read_text(encoding="utf-8").splitlines()
    pairs = [json.loads(line) for line in lines]
    tokens = np.zeros((len(pairs), 2, options.seq + 1), np.int32)
    mask = np.zeros((len(pairs), 2, options.seq), bool)
    for index, pair in enumerate(pairs):
        prompt = tokenizer.encode(pair["prompt"]).ids
        for side, name in enumerate(("chosen", "rejected")):
            answer = tokenizer.encode(pair[name], add_special_tokens=False).ids
            row = [*prompt, *answer, eos][: options.seq + 1]
            tokens[index, side, : len(row)] = row
            mask[index, side, len(prompt) - 1 : len(row) - 1] = True
    return {"tokens": tokens, "mask": mask}


def answer_log_probs(model: Decoder, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the log-probability of both answers of each pair, `[pairs, 2]`."""
    tokens = batch["tokens"].reshape(-1, batch["tokens"].shape[-1])
    mask = batch["mask"].reshape(-1, batch["mask"].shape[-1])
    logits = model(tokens[:, :-1])
    log_probs = fsdp.ops.vocab_parallel_log_probs(logits, tokens[:, 1:])
    return fsdp.rl.sequence_log_probs(log_probs, mask).reshape(-1, 2)


def reference_log_probs(
    plan: fsdp.Plan, params: Any, columns: Columns, batch: int
) -> np.ndarray:
    """Returns the log-probabilities of all answers, `[pairs, 2]`, batch by batch."""
    forward, count = fsdp.make_forward(plan, answer_log_probs), len(columns["mask"])
    found = []
    for start in range(0, count, batch):
        # Every rank needs rows, so that the last pair fills up the last batch.
        rows = np.minimum(np.arange(start, start + batch), count - 1)
        part = {name: column[rows] for name, column in columns.items()}
        found.append(np.asarray(forward(params, part)))
    return np.concatenate(found)[:count]


def batches(columns: Columns, options: Options):
    """Yields batches of pairs without end, in another order each time through."""
    rng = np.random.default_rng(options.seed)
    while True:
        order = rng.permutation(len(columns["mask"]))
        for start in range(0, len(order) - options.batch + 1, options.batch):
            rows = order[start : start + options.batch]
            yield {name: column[rows] for name, column in columns.items()}


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
    columns = read_pairs(options)
    columns["reference"] = reference_log_probs(plan, params, columns, options.batch)

    def loss_fn(model: Decoder, batch: dict[str, jax.Array]) -> Any:
        log_probs, known = answer_log_probs(model, batch), batch["reference"]
        found = fsdp.rl.dpo_loss(*log_probs.T, *known.T, beta=options.beta)
        margin = found.chosen_rewards - found.rejected_rewards
        return found.loss.mean(), {"margin": margin.mean()}

    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            optax.linear_schedule(options.lr, 0, options.steps), weight_decay=0
        ),
    )
    state = fsdp.init_state(plan, tx, params)
    step = fsdp.make_train_step(plan, loss_fn, tx, has_aux=True)
    metrics = []
    endless = batches(columns, options)
    for number in range(1, options.steps + 1):
        state, found = step(state, next(endless))
        loss, margin = float(found["loss"]), float(found["aux"]["margin"])
        metrics.append({"step": number, "loss": loss, "margin": margin})
        print(json.dumps(metrics[-1]))
    bridge.save_hf(options.save, state.params, config)
    return metrics


if __name__ == "__main__":
    train(tyro.cli(Options))
