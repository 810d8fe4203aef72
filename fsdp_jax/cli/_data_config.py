"""Options that decide the batches of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Tokenizer = Literal["bytes", "model"]
RowsOf = Literal["pack", "pad"]
Overlong = Literal["truncate", "drop"]
TrainOn = Literal["completions", "all"]
Objective = Literal["sft", "dpo", "reward"]

_OF_DOCUMENTS = ("rows", "overlong", "train_on", "data_weights", "objective")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Batches: the same for equal configs, on any mesh and number of hosts.

    Attributes:
      tokenizer: Tokenizer of the data.
      batch: Rows of a global batch.
      seq: Tokens that a row predicts; it holds one more.
      seed: Seed of the order of the data, and of random weights.
      rows: Layout of documents in rows.
      overlong: Treatment of documents that are longer than a row.
      train_on: Tokens of documents that are trained.
      data_weights: Share of each file among the rows.
      objective: What is learned: documents (sft), preferences of pairs (dpo), or their
        rewards (reward).
    """

    tokenizer: Tokenizer
    batch: int = 8
    seq: int = 256
    seed: int = 0
    rows: RowsOf = "pack"
    overlong: Overlong = "truncate"
    train_on: TrainOn = "completions"
    data_weights: str = ""
    objective: Objective = "sft"

    def problems(self) -> list[str]:
        """Returns what is out of range, by option."""
        wrong = [
            f"--{name} {getattr(self, name)} must be at least 1"
            for name in ("batch", "seq")
            if getattr(self, name) < 1
        ]
        if not 0 <= self.seed < 2**32:
            wrong.append(f"--seed {self.seed} must be at least 0 and below 2**32")
        if self.has_pairs and self.train_on == "all":
            wrong.append(
                f"--train-on all: --objective {self.objective} compares answers alone"
            )
        return wrong

    @property
    def has_pairs(self) -> bool:
        """Whether each record is a pair of answers."""
        return self.objective != "sft"

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of a document: the last predicts nothing.

        A reward is read at the last token itself.
        """
        return self.seq if self.objective == "reward" else self.seq + 1


def options_of_kind(
    values: Mapping[str, Any], *, documents: bool, pairs: bool
) -> dict[str, Any]:
    """Returns options without those that a kind of data does not have.

    Args:
      values: Options by name.
      documents: Whether the data are records, not text.
      pairs: Whether the records are pairs, each answer of which has a row of its own.
    """
    if not documents:
        return text_options(values)
    return {name: x for name, x in values.items() if not (pairs and name == "rows")}


def text_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options without those that text files do not have.

    Args:
      values: Options by name.
    """
    return {name: x for name, x in values.items() if name not in _OF_DOCUMENTS}


def refuse_document_options(given: dict[str, Any]) -> None:
    """Raises a `ValueError` for options of documents, which text files do not have.

    Args:
      given: Options from the command line, by name.
    """
    wrong = [
        f"--{name.replace('_', '-')} {given[name]}"
        for name in _OF_DOCUMENTS
        if name in given
    ]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: for --data of records (JSON Lines, Parquet, data "
            "sets), not for text."
        )
