"""Records of preference pairs: a chosen and a rejected answer to a prompt."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

from fsdp_jax.cli._chat_template import ChatTemplate
from fsdp_jax.cli._records import Record, conversation_record, text_of

_ANSWERS = ("chosen", "rejected")


def pair_records(fields: Any, template: ChatTemplate | None) -> tuple[Record, Record]:
    """Returns both answers of a pair, each behind the prompt.

    Answers are texts or lists of messages. Without a `prompt`, the prompt is what both
    begin with; a prompt that is a text beside messages is one of those already.

    Args:
      fields: Object with `chosen`, `rejected` and perhaps `prompt`.
      template: Chat template for messages; None if the model has none.

    Raises:
      ValueError: If it is no such pair, or the answers are equal.
    """
    if not isinstance(fields, dict) or not fields.keys() >= set(_ANSWERS):
        found = (
            ", ".join(fields) if isinstance(fields, dict) and fields else "no fields"
        )
        raise ValueError(
            f"has {found}; --objective dpo and reward train on pairs: chosen and "
            "rejected, and prompt unless both begin with it"
        )
    chosen, rejected = fields["chosen"], fields["rejected"]
    if chosen == rejected:
        raise ValueError("chosen and rejected are equal")
    if isinstance(chosen, list) and isinstance(rejected, list):
        return _of_messages(fields, template)
    return _of_texts(fields)


def _of_texts(fields: Mapping[str, Any]) -> tuple[Record, Record]:
    chosen, rejected = (text_of(fields, name) for name in _ANSWERS)
    if "prompt" in fields:
        prompt = text_of(fields, "prompt")
    else:
        # The answers of a pair begin with a space, as TRL splits them.
        prompt = os.path.commonprefix([chosen, rejected]).removesuffix(" ")
        chosen, rejected = (x.removeprefix(prompt) for x in (chosen, rejected))

    def record(answer: str) -> Record:
        text = prompt + answer
        return Record(text, ((len(prompt), len(text)),))

    return record(chosen), record(rejected)


def _of_messages(
    fields: Mapping[str, Any], template: ChatTemplate | None
) -> tuple[Record, Record]:
    sides, prompt = [fields[name] for name in _ANSWERS], fields.get("prompt")
    if isinstance(prompt, list):
        sides, before = [[*prompt, *side] for side in sides], len(prompt)
    else:
        pairs = zip(*sides, strict=False)
        shared = list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        before = len(shared)
        if prompt is not None and not any(_says(each, prompt) for each, _ in shared):
            raise ValueError(
                "prompt is a text, and no message that chosen and rejected begin with: "
                "give it as a list of messages"
            )

    def record(messages: list[Any]) -> Record:
        return conversation_record({**fields, "messages": messages}, template, before)

    return record(sides[0]), record(sides[1])


def _says(message: Any, text: Any) -> bool:
    return isinstance(message, dict) and message.get("content") == text
