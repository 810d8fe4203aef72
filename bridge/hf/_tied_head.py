"""An output projection that is stored though the config ties it to the embedding."""

import dataclasses
import math

import numpy as np

from bridge.families import FAMILIES
from bridge.formats._source import Source
from bridge.models import DecoderConfig
from bridge.rules._mapping import Mapping

_HEAD = "lm_head.kernel"
_EMBEDDING = "embed_tokens.embedding"
_ELEMENTS = 1 << 24  # of the two tensors in memory at a time


def table_of(mapping: Mapping) -> str:
    """Returns the name of the embedding's tensor."""
    return mapping.by_destination()[_EMBEDDING][0].source


def head_of(config: DecoderConfig) -> str:
    """Returns the name that the tensor of an output projection has in a family.

    Args:
      config: The model; tied, it has none of its own, and files may hold it all the
        same.
    """
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    rules = FAMILIES[config.model_type].mapping(untied).rules
    return next(r.sources[0] for r in rules if _HEAD in r.destinations)


def check_tied_head(source: Source, mapping: Mapping, config: DecoderConfig) -> None:
    """Checks that a stored output projection is the embedding that it is tied to.

    transformers does not tie the two if their values differ, whatever the config says.

    Args:
      source: The checkpoint.
      mapping: The rules of a model whose embedding is its output projection.
      config: The model.

    Raises:
      ValueError: If the checkpoint holds both, with other values or shapes.
    """
    table, head = table_of(mapping), head_of(config)
    if not {table, head} <= set(source.keys()):
        return
    if not equal_tensors(source, table, head):
        raise ValueError(
            f"'{source.name}' holds '{head}' beside '{table}', with other values "
            "or another shape, but tie_word_embeddings is true: transformers does not "
            "tie them then. Set tie_word_embeddings to false in config.json, or pass "
            "config=dataclasses.replace(config, tie_word_embeddings=False)."
        )


def equal_tensors(source: Source, one: str, other: str) -> bool:
    """Compares two tensors by a few rows at a time.

    Args:
      source: The checkpoint.
      one: Name of a tensor.
      other: Name of another.
    """
    shape = source.shape(one)
    if source.shape(other) != shape or not shape:
        return False
    step = max(1, _ELEMENTS // max(1, math.prod(shape[1:])))
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
