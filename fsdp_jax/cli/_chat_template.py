"""The chat template of a model, rendered by transformers."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fsdp_jax.cli._errors import require
from fsdp_jax.cli._special_tokens import read_json, tokens_of_template

Span = tuple[int, int]
"""First character of a stretch of text, and the one behind its last."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template, as the checkpoint has it.

    Attributes:
      source: Jinja source.
      tokens: Special tokens that the templates may name, e.g. `eos_token`.
      tool_use: Jinja source of the template of that name, for conversations with
        tools; None for `source`.
    """

    source: str
    tokens: Mapping[str, str]
    tool_use: str | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        first: int = 0,
        options: Mapping[str, Any] = _NONE,
    ) -> tuple[str, list[Span]]:
        """Renders a conversation.

        Args:
          messages: Messages, each with `role` and `content`.
          tools: Descriptions of tools, if the template knows them; None for none.
          first: Number of messages that belong to the prompt.
          options: Variables of the template, e.g. `enable_thinking`.

        Returns:
          The text, and the spans of it that the assistant writes behind the prompt:
          those that the template marks by `{% generation %}`, or else what each
          assistant message adds to the text of the messages before it and the
          generation prompt.

        Raises:
          ValueError: If the template refuses the messages, or the text of the first
            messages changes when others follow, so that no span is known.
        """
        conversation = functools.partial(self._call, tools=tools, options=options)
        if _GENERATION.search(self._source(tools)):
            text, spans = conversation(messages, return_assistant_tokens_mask=True)
            start = len(_prefix(conversation, messages, first, text)) if first else 0
            return text, [(begin, end) for begin, end in spans if begin >= start]
        text, spans = conversation(messages)[0], []
        for index, message in enumerate(messages):
            if index < first or message.get("role") != "assistant":
                continue
            prompt, _ = conversation(messages[:index], add_generation_prompt=True)
            upto = _prefix(conversation, messages, index + 1, text)
            if not upto.startswith(prompt):
                raise ValueError(_changes(index + 1))
            spans.append((len(prompt), len(upto)))
        return text, spans

    def prompt(self, text: str) -> str:
        """Renders a question of the user, and the beginning of the answer.

        Args:
          text: Question.
        """
        messages = [{"role": "user", "content": text}]
        return self._call(messages, tools=None, add_generation_prompt=True)[0]

    def _source(self, tools: Any) -> str:
        return self.source if tools is None else self.tool_use or self.source

    def _call(
        self,
        messages: Sequence[Any],
        *,
        tools: Any,
        options: Mapping[str, Any] = _NONE,
        **flags: bool,
    ) -> tuple[str, list[Span]]:
        utils = require("transformers.utils.chat_template_utils", "a chat template")
        try:
            texts, spans = utils.render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self._source(tools),
                **{**self.tokens, **options},
                **flags,
            )
        except Exception as error:  # A template may raise anything by itself.
            raise ValueError(f"the chat template fails: {error}") from error
        return texts[0], [(start, end) for start, end in spans[0]] if spans else []


def _prefix(
    conversation: Callable[..., tuple[str, list[Span]]],
    messages: Sequence[Mapping[str, Any]],
    count: int,
    text: str,
) -> str:
    """Returns the text of the first messages, with which that of all has to begin."""
    prefix, _ = conversation(messages[:count])
    if not text.startswith(prefix):
        raise ValueError(_changes(count))
    return prefix


def _changes(number: int) -> str:
    return (
        f"the chat template renders message {number} differently when others follow: "
        "which part the assistant writes is not known. A template with {% generation "
        "%} blocks says it, where the prompt before them stays as it is"
    )


def read_chat_template(directory: Path | None) -> ChatTemplate | None:
    """Reads the chat template of a model; None if there is none.

    Args:
      directory: Directory of the model's files.
    """
    if directory is None:
        return None
    named = _named_templates(directory)
    if "default" not in named:
        return None
    used = "".join(named.get(name, "") for name in ("default", "tool_use"))
    tokens = tokens_of_template(directory, used)
    return ChatTemplate(named["default"], tokens, named.get("tool_use"))


def _named_templates(directory: Path) -> dict[str, str]:
    """Returns the templates of a model by name; the plain one is the default."""
    source = read_json(directory / "tokenizer_config.json").get("chat_template")
    named: dict[str, str] = {}
    if isinstance(source, list):
        named = {each["name"]: each["template"] for each in source}
    elif isinstance(source, str):
        named = {"default": source}
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        named[file.stem] = file.read_text()
    if (file := directory / "chat_template.jinja").is_file():
        named["default"] = file.read_text()
    return named
