"""Text files as one array of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from fsdp_jax.cli._codec import check_vocab, open_codec
from fsdp_jax.cli._recipe import Tokenizer

Tokens = Integer[np.ndarray, " tokens"]


def check_files(files: Sequence[Path]) -> None:
    """Raises a `ValueError` that lists every file that is absent or empty."""
    wrong = [f"'{f}' is not there" for f in files if not f.exists()]
    wrong += [f"'{f}' is no file" for f in files if f.exists() and not f.is_file()]
    wrong += [f"'{f}' is empty" for f in files if f.is_file() and not f.stat().st_size]
    if wrong or not files:
        raise ValueError(
            f"--data: {'; '.join(wrong) or 'at least one file is needed'}."
        )


def read_tokens(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    tokenizer_file: Path | None,
    vocab_size: int,
) -> Tokens:
    """Reads files, one after the other.

    Args:
      files: Any files for bytes, UTF-8 text for the model's tokenizer.
      tokenizer: `bytes` are their own ids, 0 to 255; `model` has a `tokenizer.json`.
      tokenizer_file: That file, if there is one.
      vocab_size: Rows of the model's embedding.

    Raises:
      ValueError: If an id would have no row of the embedding, there is no tokenizer,
        or a file is no text.
    """
    codec = open_codec(tokenizer, tokenizer_file, vocab_size)
    if tokenizer == "bytes":  # Any files, and not only text.
        return np.concatenate([np.fromfile(file, np.uint8) for file in files])
    ids = [np.asarray(codec.encode(_read_text(file)), np.uint32) for file in files]
    tokens = np.concatenate(ids)
    check_vocab(vocab_size, int(tokens.max(initial=0)) + 1, f"'{tokenizer_file}'")
    return tokens


def fingerprint(tokens: Tokens) -> str:
    """What tells these tokens from any others."""
    return hashlib.sha256(tokens.data).hexdigest()


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--data '{file}' is no UTF-8 text ({error}). Use --tokenizer bytes."
        ) from error
