"""Fine-tuning of a Hugging Face model by low-rank factors, sharded (LoRA and QLoRA).

    python examples/sft_lora.py --model DIR --data DATA.jsonl --save ADAPTER --base nf4

Each line of DATA.jsonl has a `prompt` and a `completion`, of which the latter is
trained. The weights of the model are frozen, sharded, and stored in 16, 8 or 4 bits.
The result is an adapter that PEFT, transformers and vLLM load.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
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
      data: Prompts and completions, one JSON object a line.
      save: Directory for the adapter, in PEFT's format.
      steps: Number of updates.
      batch: Rows of a batch.
      seq: Maximum number of tokens of a row; more are cut off.
      lr: Learning rate at its peak.
      rank: Rank of the factors.
      alpha: Numerator of their scale, `alpha / rank`.
      targets: Modules with factors, by PEFT's names.
      base: Format of the frozen weights; default bfloat16.
      seed: Seed of the factors and of the order of the data.
      eos: Token that ends a completion.
    """

    model: Path
    data: Path
    save: Path
    steps: int = 100
    batch: int = 8
    seq: int = 256
    lr: float = 2e-4
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("all-linear",)
    base: Literal["int8", "nf4"] | None = None
    seed: int = 0
    eos: str = "</s>"


def read_rows(options: Options) -> Columns:
    """Returns tokens, `[rows, seq + 1]`, and the mask of targets in completions."""
    tokenizer = tokenizers.Tokenizer.from_file(str(options.model / "tokenizer.json"))
    eos = tokenizer.token_to_id(options.eos)
    if eos is None:
        raise ValueError(f"--eos {options.eos}: the tokenizer has no such token.")
    records = [json.loads(line) for line in options.data.read_text().splitlines()]
    tokens = np.zeros((len(records), options.seq + 1), np.int32)
    mask = np.zeros((len(records), options.seq), bool)
    for index, record in enumerate(records):
        prompt = tokenizer.encode(record["prompt"]).ids
        answer = tokenizer.encode(record["completion"], add_special_tokens=False).ids
        row = [*prompt, *answer, eos][: options.seq + 1]
        tokens[index, : len(row)] = row
        mask[index, len(prompt) - 1 : len(row) - 1] = True
    return {"tokens": tokens, "mask": mask}


def batches(columns: Columns, options: Options) -> Iterator[Columns]:
    """Yields batches without end, in another order each time through."""
    rng = np.random.default_rng(options.seed)
    while True:
        order = rng.permutation(len(columns["mask"]))
        for start in range(0, len(order) - options.batch + 1, options.batch):
            rows = order[start : start + options.batch]
            yield {name: column[rows] for name, column in columns.items()}


def loss_fn(model: Decoder, batch: dict[str, jax.Array]) -> Any:
    """Returns the sum over this device's trained tokens, and their number."""
    tokens = batch["tokens"]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(tokens[:, :-1]), tokens[:, 1:]
    )
    return jnp.where(batch["mask"], losses, 0).sum(), batch["mask"].sum()


def plan_model(config: DecoderConfig, options: Options) -> fsdp.Plan:
    """Plans the model with factors beside its frozen weights, a layer a unit."""
    targets = [
        fsdp.lora.LoRATarget(path, num_in=num_in)
        for path, num_in in bridge.lora_targets(config, options.targets).items()
    ]
    return fsdp.fully_shard(
        lambda key: Decoder(config, rngs=nnx.Rngs(key), scan=fsdp.scan),
        fsdp.make_mesh(),
        units=[DecoderLayer],
        config=fsdp.FSDPConfig(
            lora=fsdp.LoRAConfig(
                options.rank, targets, alpha=options.alpha, base=options.base
            ),
            mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16),
        ),
    )


def train(options: Options) -> list[float]:
    """Trains, saves the adapter, and returns the loss of each step."""
    config = bridge.from_hf_config(options.model)
    plan = plan_model(config, options)
    base = bridge.load_hf(options.model, fsdp.training.abstract_base_params(plan))
    params = fsdp.training.add_lora(plan, base, jax.random.key(options.seed))
    schedule = optax.warmup_cosine_decay_schedule(
        0, options.lr, options.steps // 10, options.steps
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    state = fsdp.init_state(plan, tx, params)
    step = fsdp.make_train_step(plan, loss_fn, tx, calculate_per_token_loss=True)
    losses, endless = [], batches(read_rows(options), options)
    for number in range(1, options.steps + 1):
        state, metrics = step(state, next(endless))
        losses.append(float(metrics["loss"]))
        print(f"step {number}  loss {losses[-1]:.4f}")
    factors = jax.tree.map(np.asarray, fsdp.sharding.unpack(state.params["lora"]))
    described = bridge.LoraConfig(options.rank, options.alpha)
    bridge.save_lora(options.save, bridge.Lora(described, factors, {}), config)
    return losses


if __name__ == "__main__":
    train(tyro.cli(Options))
