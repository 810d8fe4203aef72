"""Tokenizers: text to token ids, and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from fsdp_jax.cli._data_config import Tokenizer
from fsdp_jax.cli._errors import require


class TextCodec(Protocol):
    """Turns text into token ids, and back."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        ...

    def encode_with_offsets(
        self, text: str, *, add_specials: bool
    ) -> tuple[list[int], list[int]]:
        """Returns the ids of a text, and the end of each in characters.

        Args:
          text: Text.
          add_specials: Whether special tokens are added, e.g. a first one; they end at
            0 characters.
        """
        ...

    def id_of(self, token: str) -> int | None:
        """Returns the id of a special token; None if the tokenizer has no such token.

        Args:
          token: Text of the token, e.g. `</s>`.
        """
        ...

    def decode(self, ids: Sequence[int], *, keep_specials: bool = False) -> str:
        """Returns the text of some ids; invalid bytes as U+FFFD.

        Args:
          ids: Token ids.
          keep_specials: Whether special tokens are shown.
        """
        ...


class Bytes:
    """Tokenizer whose ids are the bytes of UTF-8, 0 to 255."""

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of a text."""
        return list(text.encode())

    def encode_with_offsets(
        self, text: str, *, add_specials: bool
    ) -> tuple[list[int], list[int]]:
        """Returns the bytes of a text, and the end of each in characters."""
        ends = [end for end, char in enumerate(text, 1) for _ in char.encode()]
        return self.encode(text), ends

    def id_of(self, token: str) -> None:
        """Returns None: bytes are no special tokens."""

    def decode(self, ids: Sequence[int], *, keep_specials: bool = False) -> str:
        """Returns the text of some bytes; other ids are shown as U+FFFD."""
        known = b"".join(bytes([i]) if i < 256 else b"\xff" for i in ids)
        return known.decode(errors="replace")


class ModelTokenizer:
    """A model's own `tokenizer.json`.

    Args:
      file: File `tokenizer.json`.

    Raises:
      ValueError: If the package that reads it is not installed, or the file is none.
    """

    def __init__(self, file: Path):
        """Reads the file."""
        package = require("tokenizers", "--tokenizer model")
        try:
            self._tokenizer = package.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises no other class
            raise ValueError(f"'{file}' is no tokenizer: {error}") from error
        # Some files say how inference cuts and pads: we do that, or nobody.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, special ones that the file adds included."""
        return self._tokenizer.encode(text).ids

    def encode_with_offsets(
        self, text: str, *, add_specials: bool
    ) -> tuple[list[int], list[int]]:
        """Returns the ids of a text, and the end of each in characters."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_specials)
        return encoding.ids, [end for _, end in encoding.offsets]

    def id_of(self, token: str) -> int | None:
        """Returns the id of a special token; None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    def decode(self, ids: Sequence[int], *, keep_specials: bool = False) -> str:
        """Returns the text of some ids, by default without special ones."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not keep_specials)


def open_codec(
    tokenizer: Tokenizer, tokenizer_file: Path | None, vocab_size: int
) -> TextCodec:
    """Opens a tokenizer.

    Args:
      tokenizer: Kind: bytes are their own ids, the model's has a `tokenizer.json`.
      tokenizer_file: File `tokenizer.json`; None if there is none.
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
