"""The tokenizer in a model's own files, where it has one that is read."""

from __future__ import annotations

from pathlib import Path

from fsdp_jax.cli._data_config import Tokenizer
from fsdp_jax.cli._model_source import Checkpoint, Origin
from fsdp_jax.cli._train_config import stored_config

# Vocabularies that other programs read.
_OTHER_TOKENIZERS = (
    *("tokenizer.model*", "*.tiktoken", "spiece.model", "sentencepiece.bpe.model"),
    *("tekken.json", "vocab.json", "vocab.txt", "merges.txt"),
)


def tokenizer_file(origin: Origin) -> Path | None:
    """Returns the model's `tokenizer.json`; None if there is none."""
    if origin.files is None:
        return None
    file = origin.files / "tokenizer.json"
    return file if file.is_file() else None


def default_tokenizer(origin: Origin) -> Tokenizer:
    """Returns the tokenizer where none is asked for: the model's, or bytes without one.

    Of a run it is the one that it was trained with.

    Raises:
      ValueError: If the model has one in files that are not read.
    """
    if isinstance(origin, Checkpoint) and (stored := origin.metadata.get("train")):
        return stored_config(stored).data.tokenizer
    if tokenizer_file(origin) is not None:
        return "model"
    if (folder := origin.files) is None:
        return "bytes"
    found = (file for kind in _OTHER_TOKENIZERS for file in sorted(folder.glob(kind)))
    if others := [file.name for file in found]:
        raise ValueError(
            f"'{folder}' has {', '.join(others)}, and no tokenizer.json, which is what "
            "fsdp-jax reads. Write one into a copy of the model by transformers: "
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained(COPY). Or "
            "choose --tokenizer bytes, whose tokens the model does not know."
        )
    return "bytes"
