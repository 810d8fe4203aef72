"""Training data of either kind: text cut into rows, or documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_jax.cli._data import (
    Batches,
    Windows,
    make_batches,
    mixed_batches,
    origins,
    with_batch,
)
from fsdp_jax.cli._data_config import DataConfig
from fsdp_jax.cli._document_data import DocumentData, Encoder, read_documents
from fsdp_jax.cli._log import say
from fsdp_jax.cli._model_source import Origin
from fsdp_jax.cli._own_tokenizer import tokenizer_file
from fsdp_jax.cli._records import has_records
from fsdp_jax.cli._special_tokens import end_token
from fsdp_jax.cli._tokenizer import TextCodec, open_codec
from fsdp_jax.cli._tokens import Tokens, fingerprint, read_in_first, read_tokens
from fsdp_jax.data._host_batches import HostShard

TrainingData = Tokens | DocumentData

_TOKENS = "fsdp-jax-tokens.npy"


def read_data(
    files: Sequence[Path], origin: Origin, config: DataConfig, share: Path | None
) -> TrainingData:
    """Reads files of one kind.

    Args:
      files: Text files; or files, folders and hub ids of records.
      origin: Model, with its tokenizer and chat template.
      config: Options of the data.
      share: Directory in which the first process leaves tokens for the others; None if
        there is one process, or each is to read all for itself.

    Raises:
      ValueError: If files are not as they should be, as for `read_tokens` and
        `read_documents`.
    """
    vocab_size, tokenizer = origin.config.vocab_size, tokenizer_file(origin)
    if has_records(files[0]):
        return read_documents(files, encoder_of(origin, config), config, share)

    def read() -> Tokens:
        return read_tokens(files, config.tokenizer, tokenizer, vocab_size)

    if config.tokenizer == "bytes" or share is None:
        return read()
    return read_in_first(share / _TOKENS, read)


def encoder_of(origin: Origin, config: DataConfig) -> Encoder:
    """Returns what turns records into documents of a model.

    Args:
      origin: Model.
      config: Options of the data.
    """
    codec = codec_of(origin, config)
    eos = end_token(codec, origin.files, origin.config)
    return Encoder(codec, origin.files, eos, origin.config.vocab_size)


def codec_of(origin: Origin, config: DataConfig) -> TextCodec:
    """Opens the tokenizer of the data.

    Args:
      origin: Model.
      config: Options of the data.
    """
    vocab_size = origin.config.vocab_size
    return open_codec(config.tokenizer, tokenizer_file(origin), vocab_size)


def batches_of(data: TrainingData, config: DataConfig, shard: HostShard) -> Batches:
    """Makes this host's rows of global batches, as `make_batches` does.

    Args:
      data: Data from `read_data`.
      config: Batch, row length and seed.
      shard: Rows of a batch that this host reads, from `host_shard`.
    """
    if isinstance(data, DocumentData):
        return mixed_batches(data.sources, data.weights, config, shard)
    return make_batches(data, config, shard)


def move_to(batches: Batches, metadata: Mapping[str, Any], config: DataConfig) -> None:
    """Moves batches to the position of a saved step: to the row that came next there.

    Args:
      batches: Batches from `batches_of`.
      metadata: Metadata of the step; without a position, the batches stay.
      config: Batch of this run, which may differ from that of the step.
    """
    if "data" not in metadata:
        return
    stored = metadata["train"]["data"]["batch"]
    if stored != config.batch:
        say(
            f"the batch changes from {stored} to {config.batch} rows: the same rows "
            "in the same order, in other batches; schedules count updates as before"
        )
    batches.set_state(with_batch(metadata["data"], stored, config.batch))


def name_rows(data: TrainingData, config: DataConfig, rows: Sequence[int]) -> str:
    """Names the data of rows of the endless stream: where a person finds it.

    Args:
      data: Data from `read_data`.
      config: Row length and seed.
      rows: Rows of the stream, from `Batches.last_rows`.
    """
    if isinstance(data, DocumentData):
        found = origins(data.sources, data.weights, config.seed, rows)
        return data.name_rows(found)
    found = origins([Windows(data, config.seq)], None, config.seed, rows)
    starts = sorted({index * config.seq for _, index in found})
    spans = (f"{start}-{start + config.seq}" for start in starts)
    return f"tokens {', '.join(spans)} of --data"


def fingerprint_of(data: TrainingData) -> str:
    """Returns a hash of all tokens.

    Args:
      data: Data from `read_data`.
    """
    return data.fingerprint() if isinstance(data, DocumentData) else fingerprint(data)


def describe(data: TrainingData, config: DataConfig) -> Iterator[str]:
    """Yields lines on the data, with counts of all that is left out.

    Args:
      data: Data from `read_data`.
      config: Options of the data.
    """
    if isinstance(data, DocumentData):
        yield from data.describe()
        if config.tokenizer == "bytes":
            yield "tokens are the bytes of UTF-8 (--tokenizer bytes)"
        return
    yield (
        f"{len(data):,} tokens (--tokenizer {config.tokenizer}), {config.batch} x "
        f"{config.seq} a step"
    )
