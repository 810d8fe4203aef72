"""The chat template of a model, rendered by transformers."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_jax.cli._errors import require

Span = tuple[int, int]
"""First character of a stretch of text, and the one behind its last."""

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template, as the checkpoint has it.

    Attributes:
      source: Jinja source.
      tokens: Special tokens that the template may name, e.g. `eos_token`.
    """

    source: str
    tokens: Mapping[str, str]

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None
    ) -> tuple[str, list[Span]]:
        """Renders a conversation.

        Args:
          messages: Messages, each with `role` and `content`.
          tools: Descriptions of tools, if the template knows them.

        Returns:
          The text, and the spans of it that the assistant writes: those that the
          template marks by `{% generation %}`, or else what each assistant message adds
          to the text of the messages before it and the generation prompt.

        Raises:
          ValueError: If the template refuses the messages, or the text of the first
            messages changes when others follow, so that no span is known.
        """
        if re.search(r"\{%-?\s*generation\s*-?%\}", self.source):
            text, spans = self._call(messages, tools, return_assistant_tokens_mask=True)
            return text, [(start, end) for start, end in spans]
        text, spans = self._call(messages, tools)[0], []
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            prompt, _ = self._call(messages[:index], tools, add_generation_prompt=True)
            upto, _ = self._call(messages[: index + 1], tools)
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
        return self._call(messages, None, add_generation_prompt=True)[0]

    def _call(self, messages: Sequence[Any], tools: Any, **options: Any):
        utils = require("transformers.utils.chat_template_utils", "a chat template")
        try:
            texts, spans = utils.render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self.source,
                **self.tokens,
                **options,
            )
        except Exception as error:  # A template may raise anything by itself.
            raise ValueError(f"the chat template fails: {error}") from error
        return texts[0], spans[0] if spans else []


def read_chat_template(directory: Path | None) -> ChatTemplate | None:
    """Reads the chat template of a model; None if there is none.

    Args:
      directory: Directory of the model's files.
    """
    if directory is None:
        return None
    config = _read_json(directory / "tokenizer_config.json")
    file = directory / "chat_template.jinja"
    source = file.read_text() if file.is_file() else config.get("chat_template")
    if isinstance(source, list):  # Named templates; the plain one is the default.
        named = {each["name"]: each["template"] for each in source}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    tokens = {name: _content(config.get(name)) for name in _TOKENS}
    return ChatTemplate(source, {k: v for k, v in tokens.items() if v is not None})


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}


def _content(token: Any) -> str | None:
    """Returns the text of a token, which may be described by an object."""
    return token.get("content") if isinstance(token, dict) else token
