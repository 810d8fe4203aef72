"""Text files as a sequence of token ids, read where they are used."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Integer

from fsdp_jax.checkpoint._multihost import check_same, exchange, together
from fsdp_jax.cli._data_config import Tokenizer
from fsdp_jax.cli._dataset import check_folder, dataset_name
from fsdp_jax.cli._records import is_json
from fsdp_jax.cli._tables import check_table, is_table
from fsdp_jax.cli._tokenizer import check_vocab, open_codec


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """Token ids, one part after the other.

    Attributes:
      parts: Arrays; those mapped from files are read where a slice touches them.
    """

    parts: tuple[Integer[np.ndarray, " ids"], ...]

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return sum(map(len, self.parts))

    def __getitem__(self, which: slice) -> Integer[np.ndarray, " ids"]:
        """Returns a slice of the tokens."""
        start, stop, step = which.indices(len(self))
        pieces, first = [self.parts[0][:0]], 0
        for part in self.parts:
            pieces.append(part[max(start - first, 0) : max(stop - first, 0)])
            first += len(part)
        return np.concatenate(pieces)[::step]


_COMPRESSED = (".gz", ".tgz", ".zst", ".bz2", ".xz", ".zip", ".lz4")


def check_files(files: Sequence[Path], option: str = "--data") -> None:
    """Raises a `ValueError` that lists every file that is absent, empty or compressed.

    Folders are checked as data sets; ids of the hub when they are read.

    Args:
      files: Files, folders and hub ids.
      option: Option that names them, for the message.
    """
    entries, files = files, [f for f in files if dataset_name(f) is None]
    wrong = [f"'{f}' is not there" for f in files if not f.exists()]
    wrong += [f"'{f}' is not a file" for f in files if f.exists() and not f.is_file()]
    wrong += [f"'{f}' is empty" for f in files if f.is_file() and not f.stat().st_size]
    wrong += [
        f"'{f}' is compressed: only records are read so, such as .jsonl.gz"
        for f in files
        if f.suffix.lower() in _COMPRESSED and not is_json(f)
    ]
    if wrong or not entries:
        raise ValueError(f"{option}: {'; '.join(wrong) or 'give 1 file or more'}.")
    for entry in entries:
        if entry not in files:
            check_folder(entry, option)
    for table in filter(is_table, files):
        check_table(table)


def read_tokens(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    tokenizer_file: Path | None,
    vocab_size: int,
) -> Tokens:
    """Reads files, one after the other; bytes only where they are used.

    Args:
      files: Files of any kind for bytes, of UTF-8 text for the model's tokenizer;
        compressed ones, which `check_files` refuses, are neither.
      tokenizer: Kind: bytes are their own ids, 0 to 255.
      tokenizer_file: File `tokenizer.json`; None if there is none.
      vocab_size: Rows of the model's embedding.

    Raises:
      ValueError: If an id would have no row of the embedding, there is no tokenizer,
        or a file is not a text.
    """
    codec = open_codec(tokenizer, tokenizer_file, vocab_size)
    if tokenizer == "bytes":  # Any files, and not only text.
        return Tokens(tuple(np.memmap(file, np.uint8, mode="r") for file in files))
    ids = [np.asarray(codec.encode(_read_text(file)), np.uint32) for file in files]
    tokens = np.concatenate(ids)
    check_vocab(vocab_size, int(tokens.max(initial=0)) + 1, f"'{tokenizer_file}'")
    return Tokens((tokens,))


def read_in_first(file: Path, read: Callable[[], Tokens]) -> Tokens:
    """Reads tokens in the first process alone, for all.

    Args:
      file: File that the other processes map; unused with one process.
      read: Function that reads the tokens.

    Raises:
      OtherProcessError: If it failed, in the others.
    """
    if jax.process_count() == 1:
        return read()
    with together("Reading the text"):
        if jax.process_index() == 0:
            _write(file, read())
    return Tokens((np.load(file, mmap_mode="r"),))


def fingerprint(tokens: Tokens) -> str:
    """Returns a hash of the tokens, computed by process 0 for all.

    Raises:
      ValueError: If another process has other files.
    """
    check_same("What --data holds", [len(part) for part in tokens.parts])
    return exchange(_sha256(tokens) if jax.process_index() == 0 else None)[0]


def _sha256(tokens: Tokens) -> str:
    digest = hashlib.sha256()
    for part in tokens.parts:
        digest.update(part.data)
    return digest.hexdigest()


def _write(file: Path, tokens: Tokens) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    with part.open("wb") as out:
        np.save(out, tokens[:])
    part.replace(file)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--data '{file}' is not UTF-8 text ({error}). Use --tokenizer bytes."
        ) from error
