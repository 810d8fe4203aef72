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
            return _behind_prompt(conversation, messages, first)
        text, spans = conversation(messages)[0], []
        for index, message in enumerate(messages):
            if index < first or message.get("role") != "assistant":
                continue
            prompt, _ = conversation(messages[:index], add_generation_prompt=True)
            upto, _ = conversation(messages[: index + 1])
            if not (text.startswith(upto) and upto.startswith(prompt)):
                raise ValueError(
                    f"the chat template renders message {index + 1} differently when "
                    "others follow, and has no {% generation %} block: which part the "
                    "assistant writes is not known"
                )
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


def _behind_prompt(
    conversation: Callable[..., tuple[str, list[Span]]],
    messages: Sequence[Mapping[str, Any]],
    first: int,
) -> tuple[str, list[Span]]:
    """Renders a template that marks what the assistant writes, and drops the prompt's.

    Args:
      conversation: Renders messages.
      messages: All messages.
      first: Number of messages that belong to the prompt.
    """
    text, spans = conversation(messages, return_assistant_tokens_mask=True)
    prompt = messages[:first]
    if not any(message.get("role") == "assistant" for message in prompt):
        return text, spans
    before, told = conversation(prompt, return_assistant_tokens_mask=True)
    if [before[slice(*span)] for span in told] != [
        text[slice(*span)] for span in spans[: len(told)]
    ]:
        raise ValueError(
            f"the chat template renders the {first} messages of the prompt otherwise "
            "where others follow: which of its {% generation %} blocks are of the "
            "completion is not known. Give the conversation as messages to train all"
        )
    return text, spans[len(told) :]


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
    named = {
        file.stem: file.read_text(encoding="utf-8")
        for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))
    }
    if (file := directory / "chat_template.jinja").is_file():
        named["default"] = file.read_text(encoding="utf-8")
    if named:  # Files replace those of the config, as in transformers.
        return named
    source = read_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(source, list):
        return {each["name"]: each["template"] for each in source}
    return {"default": source} if isinstance(source, str) else {}
