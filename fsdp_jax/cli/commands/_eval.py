"""`fsdp-jax eval`: measures the perplexity of a model on text."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from jaxtyping import Array, Float

import fsdp_jax as fsdp
from bridge.models import Decoder
from bridge.models._positions import check_length
from fsdp_jax.cli._average import averaged
from fsdp_jax.cli._data_config import Tokenizer
from fsdp_jax.cli._decoder import computed_in, plan_decoder
from fsdp_jax.cli._model_source import Origin, open_any
from fsdp_jax.cli._options import Devices, Group, IgnoreField, Unset
from fsdp_jax.cli._own_tokenizer import default_tokenizer, tokenizer_file
from fsdp_jax.cli._precision import ParamDtype
from fsdp_jax.cli._progress import rows_bar
from fsdp_jax.cli._records import has_records
from fsdp_jax.cli._tokens import Tokens, check_files, read_tokens


@dataclasses.dataclass(frozen=True)
class Eval:
    """Measure the perplexity of a model on text files.

    Every token but the first is predicted once, from those before it in its row. Prints
    one line of JSON: the mean loss in nats, its exponential, and how many tokens.

    Attributes:
      model: Model: a directory, a hub id, a Megatron checkpoint, or a checkpoint of
        fsdp-jax.
      data: Text files.
      step: Step of a checkpoint of fsdp-jax; default the newest.
      ema: Uses the average of the weights, of a run with --ema.
      batch: Rows of a global batch; default one a device.
      seq: Tokens that a row predicts; in longer rows tokens have more context.
      param_dtype: Dtype that weights are gathered and computed in.
      tokenizer: Tokenizer of the text: bytes as they are, or the model's
        tokenizer.json; default the latter where there is one.
      ignore_field: Field of config.json to ignore although it is refused; may be
        repeated. For fields that change no number.
      where: Devices.
    """

    model: tyro.conf.Positional[str]
    data: tuple[Path, ...]
    step: Unset[int] = None
    ema: bool = False
    batch: Unset[int] = None
    seq: int = 256
    param_dtype: ParamDtype = "float32"
    tokenizer: Unset[Tokenizer] = None
    ignore_field: IgnoreField = ()
    where: Annotated[Devices, Group] = Devices()

    def run(self) -> None:
        """Prints the figures."""
        check_files(self.data)
        if records := [str(file) for file in self.data if has_records(file)]:
            raise ValueError(
                f"--data {', '.join(records)}: eval reads text files, but these are "
                "records."
            )
        if self.seq < 1:
            raise ValueError(f"--seq {self.seq} must be at least 1.")
        devices = self.where.pick()
        batch = self._batch(len(devices))
        origin = open_any(self.model, self.step, ignore_fields=self.ignore_field)
        if self.ema:
            origin = averaged(origin)
        check_length(origin.config, self.seq, f"--seq {self.seq}")
        tokens = self._read_tokens(origin)
        plan = plan_decoder(
            origin.config,
            fsdp.make_mesh(devices=devices),
            computed_in(self.param_dtype),
        )
        params = origin.load_params(plan.params)
        print(json.dumps(perplexity(plan, params, tokens, batch, self.seq)))

    def _batch(self, devices: int) -> int:
        batch = devices if self.batch is None else self.batch
        if batch < 1 or batch % devices:
            raise ValueError(
                f"--batch {batch}: {devices} devices share the rows evenly. Use a "
                f"multiple of {devices}."
            )
        return batch

    def _read_tokens(self, origin: Origin) -> Tokens:
        tokens = read_tokens(
            self.data,
            self.tokenizer or default_tokenizer(origin),
            tokenizer_file(origin),
            origin.config.vocab_size,
        )
        if len(tokens) < 2:
            raise ValueError(
                f"--data holds {len(tokens)} token(s): there is nothing to predict."
            )
        return tokens


def perplexity(
    plan: fsdp.Plan, params: Any, tokens: Tokens, batch: int, seq: int
) -> dict[str, float | int]:
    """Measures the loss of tokens, each predicted once.

    Args:
      plan: Plan of the decoder.
      params: Weights.
      tokens: At least two tokens.
      batch: Rows of a global batch.
      seq: Tokens that a row predicts.

    Returns:
      `loss`, the mean in nats, `perplexity`, and `tokens`, those predicted.
    """
    evaluate = fsdp.make_eval_step(plan, _masked_loss, calculate_per_token_loss=True)
    total, count = 0.0, 0
    rows = -(-(len(tokens) - 1) // seq)
    with rows_bar("evaluating", rows) as show:
        for number, data in enumerate(_batches(plan, tokens, batch, seq), 1):
            done = min(number * batch * seq, len(tokens) - 1)
            total += float(evaluate(params, data)["loss"]) * (done - count)
            count = done
            show(min(number * batch, rows))
    return {"loss": total / count, "perplexity": _exp(total / count), "tokens": count}


def _batches(
    plan: fsdp.Plan, tokens: Tokens, batch: int, seq: int
) -> Iterator[dict[str, Array]]:
    """Yields global batches, of which each host reads its own rows."""
    rows = _PaddedRows(tokens, batch, seq)
    for mine in fsdp.HostBatches(rows, batch, fsdp.host_shard(plan.mesh)):
        yield fsdp.global_batch(plan.mesh, mine, batch)


@dataclasses.dataclass(frozen=True, eq=False)
class _PaddedRows:
    """Tokens cut into rows that fill the last batch too; the tail is masked."""

    tokens: Tokens
    batch: int
    seq: int

    def __len__(self) -> int:
        rows = -(-(len(self.tokens) - 1) // self.seq)
        return -(-rows // self.batch) * self.batch

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        found = self.tokens[index * self.seq : (index + 1) * self.seq + 1]
        row = np.zeros(self.seq + 1, np.int32)
        row[: len(found)] = found
        return {"tokens": row, "counts": np.arange(1, self.seq + 1) < len(found)}


def _masked_loss(
    model: Decoder, batch: dict[str, Array]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    tokens, counts = batch["tokens"], batch["counts"]
    losses = fsdp.ops.vocab_parallel_cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
    mine: tuple[str, ...] = ()  # The step sums over ranks.
    return (
        fsdp.ops.masked_sum(losses, counts, axes=mine),
        fsdp.ops.masked_count(counts, axes=mine),
    )


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
