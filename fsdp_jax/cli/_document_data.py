"""Documents of JSON Lines files as rows, with counts of what is left out."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from fsdp_jax.checkpoint._multihost import check_same, exchange, together
from fsdp_jax.cli._chat_template import ChatTemplate, Span, read_chat_template
from fsdp_jax.cli._data_config import DataConfig
from fsdp_jax.cli._preference_records import pair_records
from fsdp_jax.cli._records import Record, has_rows, parse_records, read_records
from fsdp_jax.cli._tokenizer import TextCodec, check_vocab
from fsdp_jax.data._documents import (
    DocumentRows,
    Documents,
    document_rows,
    join_documents,
)
from fsdp_jax.data._pairs import PairRows, RewardRows

Tokenized = tuple[list[int], list[bool]]
"""Token ids of a document, and whether each is trained."""


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Turns records into documents.

    Attributes:
      codec: Tokenizer.
      directory: Directory of the model's files, which may have a chat template.
      eos: Token that ends texts, where no template has ended them; None for none.
      vocab_size: Rows of the model's embedding.
    """

    codec: TextCodec
    directory: Path | None
    eos: int | None
    vocab_size: int

    def encode_file(self, file: Path, config: DataConfig) -> tuple[Documents, str]:
        """Reads a file, and says in a line how many documents it has.

        Args:
          file: File of records.
          config: Options of the data.

        Raises:
          ValueError: If lines are not records, or no document has a token to train on.
        """
        template = read_chat_template(self.directory)
        groups = _read_groups(file, template, config)
        limit, drops = config.max_tokens, config.overlong == "drop"
        usable, cuts, lost, alike = [], [], 0, 0
        for group in groups:
            encoded = [self.encode(record, config.train_on) for record in group]
            longer = [len(ids) - limit for ids, _ in encoded if len(ids) > limit]
            cuts += [sum(longer)] if longer else []
            if longer and drops:
                continue
            kept = [(ids[:limit], trained[:limit]) for ids, trained in encoded]
            if not all(any(trained[1:]) for _, trained in kept):
                lost += 1
            elif len(kept) == 2 and kept[0] == kept[1]:
                alike += 1  # A pair whose answers differ behind its end.
            else:
                usable += [(*each, group[0].number) for each in kept]
        if not usable:
            what = f"--data '{file}': none of {len(groups)} {_unit(config)} has a token"
            if not cuts and not alike:
                raise ValueError(
                    f"{what} to train on: are the texts empty, or does the chat "
                    "template render them as nothing?"
                )
            raise ValueError(
                f"{what} to train on in its first {limit}"
                + (f"; {alike} are equal up to there" if alike else "")
                + ". Use a larger --seq."
            )
        documents = join_documents(
            [each[:2] for each in usable], [each[2] for each in usable]
        )
        check_vocab(self.vocab_size, int(documents.ids.max()) + 1, f"'{file}'")
        parts = _counts(len(groups), documents, cuts, lost, alike, config)
        if self.eos is None and not all(one.has_specials for one, *_ in groups):
            parts.append("no eos_token ends them: neither tokenizer nor config has one")
        return documents, f"'{file}': {', '.join(parts)}"

    def encode(self, record: Record, train_on: str) -> Tokenized:
        """Tokenizes a record.

        Args:
          record: Text with the spans of its completions.
          train_on: "completions", or "all" for every token.
        """
        ids, offsets = self.codec.encode_with_offsets(
            record.text, add_specials=not record.has_specials
        )
        trained = [train_on == "all" or _is_in(end, record.spans) for end in offsets]
        if record.has_specials or self.eos is None:
            return ids, trained
        if ids[-1:] != [self.eos]:
            return [*ids, self.eos], [*trained, True]
        # One that the tokenizer has added ends at 0 characters, in no span.
        return ids, [*trained[:-1], trained[-1] or offsets[-1] == 0]


def _counts(
    records: int,
    documents: Documents,
    cuts: list[int],
    lost: int,
    alike: int,
    config: DataConfig,
) -> list[str]:
    """Returns what a file has, and what is left out of it, in numbers.

    Args:
      records: Number of documents or pairs in the file.
      documents: Those that are kept.
      cuts: Tokens behind the end of a row, of each that is longer.
      lost: Number without a token to train on.
      alike: Number of pairs whose answers are equal up to the end of a row.
      config: Options of the data.
    """
    parts = [
        f"{records:,} {_unit(config)}",
        f"{len(documents.ids):,} tokens",
        f"{documents.num_predicted:,} trained",
    ]
    longer = f"{len(cuts):,} longer than --seq {config.seq}"
    if cuts and config.overlong == "drop":
        parts.append(f"{longer} dropped")
    elif cuts:
        parts.append(f"{longer} truncated by {sum(cuts):,} tokens")
    if lost:
        parts.append(f"{lost:,} without a token to train on dropped")
    if alike:
        parts.append(f"{alike:,} equal in their first {config.max_tokens:,} dropped")
    return parts


def _read_groups(
    file: Path, template: ChatTemplate | None, config: DataConfig
) -> list[tuple[Record, ...]]:
    """Reads what is kept or dropped together: a document, or the answers of a pair."""
    if config.has_pairs:
        return parse_records(file, functools.partial(pair_records, template=template))
    return [(record,) for record in read_records(file, template)]


def _unit(config: DataConfig) -> str:
    return "pairs" if config.has_pairs else "documents"


def _is_in(end: int, spans: Sequence[Span]) -> bool:
    """Returns whether a token ends in one of the spans."""
    return any(start < end <= stop for start, stop in spans)


@dataclasses.dataclass(frozen=True)
class DocumentData:
    """Rows of documents, by file.

    Attributes:
      sources: Rows of each file.
      weights: Share of each file among the rows; None for that of its size.
      lines: Descriptions of the files.
      files: Their names.
    """

    sources: tuple[DocumentRows | PairRows, ...]
    weights: tuple[float, ...] | None
    lines: tuple[str, ...]
    files: tuple[str, ...]

    def fingerprint(self) -> str:
        """Returns a hash of all documents, the same in all processes.

        Raises:
          ValueError: If another process has other documents.
        """
        check_same("What --data holds", [len(s.documents.ids) for s in self.sources])
        digest = hashlib.sha256()
        for source in self.sources:
            documents = source.documents
            for array in (documents.ids, documents.trained, documents.ends):
                digest.update(array.tobytes())
        return exchange(digest.hexdigest() if jax.process_index() == 0 else None)[0]

    def name_rows(self, rows: Sequence[tuple[int, int]]) -> str:
        """Names the documents of rows, by file and number.

        Args:
          rows: Source of each row, and its index there.
        """
        numbers: dict[int, set[int]] = {}
        for which, row in rows:
            source = self.sources[which]
            found = source.documents.numbers[list(source.rows[row])]
            numbers.setdefault(which, set()).update(found.tolist())
        return "; ".join(
            f"{'rows' if has_rows(Path(self.files[which])) else 'lines'} "
            f"{', '.join(map(str, sorted(found)))} of '{self.files[which]}'"
            for which, found in sorted(numbers.items())
        )

    def describe(self) -> Iterator[str]:
        """Yields lines on the files and their rows."""
        yield from self.lines
        for source in self.sources:
            filled = source.documents.lengths.sum()
            if not isinstance(source, RewardRows):
                filled -= len(source.documents)
            sides = 2 if isinstance(source, PairRows) else 1
            share = filled / (sides * len(source) * source.seq)
            what = "pairs of rows" if sides == 2 else "rows"
            yield (
                f"{len(source):,} {what} of {source.seq} tokens, {share:.0%} of them "
                "filled"
            )


def read_documents(
    files: Sequence[Path], encoder: Encoder, config: DataConfig, share: Path | None
) -> DocumentData:
    """Reads files of records; in the first process, for all.

    Args:
      files: JSON Lines files.
      encoder: Turns records into documents.
      config: Options of the data.
      share: Directory that all processes see, where the first leaves the documents;
        None if there is one process.

    Raises:
      ValueError: If lines are not records, or weights do not fit the files.
      OtherProcessError: If the first process failed, in the others.
    """
    weights = parse_weights(config.data_weights, len(files))
    if jax.process_count() == 1 or share is None:
        found = [encoder.encode_file(file, config) for file in files]
    else:
        found = _read_in_first(files, encoder, config, share)
    sources = tuple(_rows_of(documents, config) for documents, _ in found)
    if weights is None and len(sources) > 1:
        weights = tuple(float(len(source)) for source in sources)
    lines = tuple(line for _, line in found)
    return DocumentData(sources, weights, lines, tuple(map(str, files)))


def _rows_of(documents: Documents, config: DataConfig) -> DocumentRows | PairRows:
    if config.objective == "reward":
        return RewardRows(documents, config.seq)
    if config.objective == "dpo":
        return PairRows(documents, config.seq)
    return document_rows(documents, config.seq, packed=config.rows == "pack")


def parse_weights(text: str, count: int) -> tuple[float, ...] | None:
    """Parses the weights of files.

    Args:
      text: Numbers separated by commas; empty for none.
      count: Number of files.

    Raises:
      ValueError: If they are not positive numbers, or not one a file.
    """
    if not text:
        return None
    try:
        weights = tuple(map(float, text.split(",")))
    except ValueError:
        weights = ()
    if len(weights) != count or not all(0 < w < float("inf") for w in weights):
        raise ValueError(
            f"--data-weights {text}: give a number above 0 for each of the {count} "
            "file(s) of --data, separated by commas."
        )
    return weights


def _read_in_first(
    files: Sequence[Path], encoder: Encoder, config: DataConfig, share: Path
) -> list[tuple[Documents, str]]:
    paths = [share / f"fsdp-jax-documents-{index}.npz" for index in range(len(files))]
    with together("Reading the documents"):
        if jax.process_index() == 0:
            share.mkdir(parents=True, exist_ok=True)
            for file, path in zip(files, paths, strict=True):
                documents, line = encoder.encode_file(file, config)
                part = path.with_suffix(".part.npz")
                np.savez(part, line=np.asarray(line), **vars(documents))
                part.replace(path)
    found = []
    for path in paths:
        with np.load(path) as stored:
            names = (field.name for field in dataclasses.fields(Documents))
            arrays = {name: stored[name] for name in names}
            found.append((Documents(**arrays), str(stored["line"])))
    return found
