"""`fsdp-jax data`: shows rows as training would see them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from rich.text import Text

from fsdp_jax._streams import LenientConsole
from fsdp_jax.cli._data_config import DataConfig, refuse_document_options
from fsdp_jax.cli._document_data import DocumentData
from fsdp_jax.cli._model_source import Origin, open_any
from fsdp_jax.cli._options import Group, IgnoreField
from fsdp_jax.cli._own_tokenizer import default_tokenizer
from fsdp_jax.cli._records import check_kinds, has_records
from fsdp_jax.cli._tokenizer import TextCodec
from fsdp_jax.cli._tokens import check_files
from fsdp_jax.cli._train_config import config_of, option_values
from fsdp_jax.cli._train_options import BatchOptions
from fsdp_jax.cli._training_data import (
    TrainingData,
    batches_of,
    codec_of,
    describe,
    read_data,
)
from fsdp_jax.data._documents import Row
from fsdp_jax.data._host_batches import HostShard


@dataclasses.dataclass(frozen=True)
class Data:
    """Show the first rows of a run, with what is left out in numbers.

    Tokens that are not trained are dimmed; without colours, trained ones are between
    brackets. The rows are those of fsdp-jax train with the same options.

    Attributes:
      model: Model whose tokenizer and chat template are used: a directory, a hub id, or
        a checkpoint.
      data: Text files, or records: files of JSON (.jsonl, .json), Parquet or Arrow, and
        Hugging Face data sets, a folder or hub id, as NAME[@REVISION][:CONFIG][:SPLIT].
      show: Number of rows to show.
      batches: Batches of the data.
      ignore_field: Field of config.json to ignore although it is refused; may be
        repeated. For fields that change no number.
    """

    model: tyro.conf.Positional[str]
    data: tuple[Path, ...]
    show: int = 3
    batches: Annotated[BatchOptions, Group] = BatchOptions()
    ignore_field: IgnoreField = ()

    def run(self) -> None:
        """Prints counts and rows."""
        check_files(self.data)
        check_kinds(self.data)
        given = option_values(self.batches)
        if not has_records(self.data[0]):
            refuse_document_options(given)
        if self.show < 0:
            raise ValueError(f"--show {self.show} must be at least 0.")
        origin = open_any(self.model, ignore_fields=self.ignore_field)
        if "tokenizer" not in given:
            given["tokenizer"] = default_tokenizer(origin)
        config = config_of(given).data
        data = read_data(self.data, origin, config, None)
        console = LenientConsole(highlight=False, soft_wrap=True)
        for line in describe(data, config):
            console.print(line, markup=False)
        self._print_rows(console, data, origin, config)

    def _print_rows(
        self,
        console: LenientConsole,
        data: TrainingData,
        origin: Origin,
        config: DataConfig,
    ) -> None:
        codec = codec_of(origin, config)
        one = dataclasses.replace(config, batch=1)
        rows = batches_of(data, one, HostShard(0, 1))
        plain = console.color_system is None
        for number in range(1, self.show + 1):
            batch = next(rows)
            console.print(f"row {number}", style="bold")
            if isinstance(data, DocumentData):
                row = {name: values[0] for name, values in batch.items()}
                for text in _as_text(row, codec, plain=plain):
                    console.print(text)
            else:
                console.print(codec.decode(batch[0].tolist()), markup=False)


def _as_text(row: Row, codec: TextCodec, *, plain: bool) -> list[Text]:
    """Decodes the documents of a row, or both answers of a pair."""
    if row["tokens"].ndim == 1:
        return documents_as_text(row, codec, plain=plain)
    texts = []
    for side, title in enumerate(("chosen", "rejected")):
        texts.append(Text(title, style="bold"))
        one = {name: values[side] for name, values in row.items()}
        texts += documents_as_text(one, codec, plain=plain)
    return texts


def documents_as_text(row: Row, codec: TextCodec, *, plain: bool) -> list[Text]:
    """Decodes the documents of a row, with untrained tokens dimmed.

    Args:
      row: Row of documents.
      codec: Tokenizer.
      plain: Whether trained tokens are marked by brackets, for outputs without styles.

    Returns:
      A text for each document.
    """
    texts = []
    for segment in range(1, int(row["segment_ids"].max()) + 1):
        where = row["segment_ids"] == segment
        tokens = row["tokens"][where].tolist()
        trained = (row["weights"][where] > 0).tolist()
        if "targets" in row:  # A token's weight is that of its target, the next one.
            tokens += row["targets"][where][-1:].tolist()
            trained = [False, *trained]
        text, start = Text(), 0
        for index in range(1, len(tokens) + 1):
            if index < len(tokens) and trained[index] == trained[start]:
                continue
            piece = codec.decode(tokens[start:index], keep_specials=True)
            if trained[start]:
                text.append(f"[{piece}]" if plain else piece)
            else:
                text.append(piece, style="dim")
            start = index
        texts.append(text)
    return texts
