"""An output projection that is stored though the config ties it to the embedding."""

import numpy as np

from bridge.formats._source import Source
from bridge.rules._mapping import Mapping

TIED_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.embedding"
_ELEMENTS = 1 << 24  # of the two tensors in memory at a time


def table_of(mapping: Mapping) -> str:
    """Returns the name of the embedding's tensor."""
    return mapping.by_destination()[_EMBEDDING][0].source


def check_tied_head(source: Source, mapping: Mapping) -> None:
    """Checks that a stored output projection is the embedding that it is tied to.

    transformers does not tie the two if their values differ, whatever the config says.

    Args:
      source: The checkpoint.
      mapping: The rules of a model whose embedding is its output projection.

    Raises:
      ValueError: If the checkpoint holds both, with other values or shapes.
    """
    table = table_of(mapping)
    if not {table, TIED_HEAD} <= set(source.keys()):
        return
    if not _equal(source, table, TIED_HEAD):
        raise ValueError(
            f"'{source.name}' holds '{TIED_HEAD}' beside '{table}', with other values "
            "or another shape, but tie_word_embeddings is true: transformers does not "
            "tie them then. Set tie_word_embeddings to false in config.json, or pass "
            "config=dataclasses.replace(config, tie_word_embeddings=False)."
        )


def _equal(source: Source, one: str, other: str) -> bool:
    """Compares two tensors by a few rows at a time."""
    shape = source.shape(one)
    if source.shape(other) != shape or len(shape) != 2:
        return False
    step = max(1, _ELEMENTS // max(1, shape[1]))
    return all(
        np.array_equal(
            _rows(source, one, start, step), _rows(source, other, start, step)
        )
        for start in range(0, shape[0], step)
    )


def _rows(source: Source, key: str, start: int, count: int) -> np.ndarray:
    rows = source.read(key, (slice(start, start + count),))
    # Of two dtypes, each value of the narrower one is one of the wider.
    return rows.astype(np.float64 if rows.dtype == np.float64 else np.float32)
