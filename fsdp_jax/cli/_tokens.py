"""Text files as one array of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from fsdp_jax.cli._errors import require
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
    if tokenizer == "bytes":
        _check_vocab(vocab_size, 256, "--tokenizer bytes")
        return np.concatenate([np.fromfile(file, np.uint8) for file in files])
    if tokenizer_file is None:
        raise ValueError(
            "--tokenizer model needs a tokenizer.json beside the model's config: give "
            "--hf a directory that has one, or use --tokenizer bytes."
        )
    tokens = _tokenize(files, tokenizer_file)
    _check_vocab(vocab_size, int(tokens.max(initial=0)) + 1, f"'{tokenizer_file}'")
    return tokens


def fingerprint(tokens: Tokens) -> str:
    """What tells these tokens from any others."""
    return hashlib.sha256(tokens.data).hexdigest()


def _tokenize(files: Sequence[Path], tokenizer_file: Path) -> Tokens:
    tokenizer = require("tokenizers", "--tokenizer model").Tokenizer.from_file(
        str(tokenizer_file)
    )
    # Some files say how inference cuts and pads: it is not for training.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = [np.asarray(tokenizer.encode(_read_text(f)).ids, np.uint32) for f in files]
    return np.concatenate(ids)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--data '{file}' is no UTF-8 text ({error}). Use --tokenizer bytes."
        ) from error


def _check_vocab(vocab_size: int, needed: int, subject: str) -> None:
    if needed > vocab_size:
        raise ValueError(
            f"{subject} makes ids up to {needed - 1}, but the model's vocabulary has "
            f"{vocab_size}. Use another tokenizer."
        )
