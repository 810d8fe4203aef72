"""Text to token ids, and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from fsdp_jax.cli._errors import require
from fsdp_jax.cli._train_config import Tokenizer


class TextCodec(Protocol):
    """What turns text into token ids."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of some ids; what is none of one is shown as such."""
        ...


class Bytes:
    """The bytes themselves, 0 to 255, in UTF-8."""

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of a text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of some bytes; other ids are shown as U+FFFD."""
        known = b"".join(bytes([i]) if i < 256 else b"\xff" for i in ids)
        return known.decode(errors="replace")


class ModelTokenizer:
    """A model's own `tokenizer.json`.

    Args:
      file: That file.

    Raises:
      ValueError: If the package that reads it is not installed.
    """

    def __init__(self, file: Path):
        """Reads the file."""
        package = require("tokenizers", "--tokenizer model")
        self._tokenizer = package.Tokenizer.from_file(str(file))
        # Some files say how inference cuts and pads: we do that, or nobody.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, special ones that the file adds included."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of some ids, without special ones."""
        return self._tokenizer.decode(list(ids))


def open_codec(
    tokenizer: Tokenizer, tokenizer_file: Path | None, vocab_size: int
) -> TextCodec:
    """Opens a tokenizer.

    Args:
      tokenizer: `bytes` are their own ids; `model` has a `tokenizer.json`.
      tokenizer_file: That file, if there is one.
      vocab_size: Rows of the model's embedding.

    Raises:
      ValueError: If a byte would have no row of the embedding, or there is no file.
    """
    if tokenizer == "bytes":
        check_vocab(vocab_size, 256, "--tokenizer bytes")
        return Bytes()
    if tokenizer_file is None:
        raise ValueError(
            "--tokenizer model needs a tokenizer.json beside the model's config: name "
            "a directory that has one, or use --tokenizer bytes."
        )
    return ModelTokenizer(tokenizer_file)


def check_vocab(vocab_size: int, needed: int, subject: str) -> None:
    """Raises a `ValueError` if ids would have no row of the embedding."""
    if needed > vocab_size:
        raise ValueError(
            f"{subject} makes ids up to {needed - 1}, but the model's vocabulary has "
            f"{vocab_size}. Use another tokenizer."
        )
