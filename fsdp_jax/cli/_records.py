"""Records of JSON Lines and tables: texts, conversations, prompts with completions."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fsdp_jax.cli._chat_template import ChatTemplate, Span
from fsdp_jax.cli._dataset import dataset_files, dataset_name
from fsdp_jax.cli._dataset_layout import format_of
from fsdp_jax.cli._errors import require
from fsdp_jax.cli._tables import is_table, read_table

_T = TypeVar("_T")
_SHOWN = 5
_SURROGATE = re.compile("[\ud800-\udfff]")
_KINDS = {
    "messages": {"messages"},
    "prompt": {"prompt", "completion"},
    "text": {"text"},
}
_OF_TEMPLATE = (("tools", list), ("chat_template_kwargs", dict))
# What the template is given in other ways.
_RESERVED = (
    *("messages", "conversations", "tools", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message"),
    "return_assistant_tokens_mask",
)
_ROLES = "user, assistant, system or another role of the template"


@dataclasses.dataclass(frozen=True)
class Record:
    """The text of a record.

    Attributes:
      text: Text, as the model sees it.
      spans: Parts of it that are completions.
      has_specials: Whether the text has its special tokens already, from a template.
      number: Number of the record in its file: its line, from 1.
    """

    text: str
    spans: tuple[Span, ...]
    has_specials: bool = False
    number: int = 0

    def __post_init__(self):
        """Refuses text that no tokenizer can read."""
        if half := _SURROGATE.search(self.text):
            raise ValueError(
                f"has {half[0]!r} in its text, half of a pair that stands for a "
                "character, without the other half"
            )


def is_json(file: Path) -> bool:
    """Returns whether a file is of JSON Lines or an array of JSON, by its name.

    Args:
      file: File of `--data`.
    """
    return format_of(file.name) in (".jsonl", ".ndjson", ".json")


def has_records(file: Path) -> bool:
    """Returns whether an entry is read as records and not as text.

    Args:
      file: File, folder or hub id of `--data`.
    """
    return is_json(file) or is_table(file) or dataset_name(file) is not None


def has_rows(file: Path) -> bool:
    """Returns whether records are counted as rows, and not as lines.

    Args:
      file: File, folder or hub id of `--data`.
    """
    is_array = format_of(file.name) == ".json"
    return is_table(file) or is_array or dataset_name(file) is not None


def check_kinds(files: Sequence[Path]) -> None:
    """Raises a `ValueError` unless files are all of records, or all of text.

    Args:
      files: Files of `--data`.
    """
    records = [f"'{file}'" for file in files if has_records(file)]
    if len(records) not in (0, len(files)):
        raise ValueError(
            f"--data has text and records ({', '.join(records)}): give files of one "
            'kind, e.g. the text as lines of {"text": ...}.'
        )


def read_records(file: Path, template: ChatTemplate | None) -> list[Record]:
    """Reads the records of an entry of `--data`.

    Args:
      file: Entry, as for `parse_records`; each record has `text`, `messages`, or
        `prompt` and `completion`.
      template: Chat template for `messages`; None if the model has none.

    Raises:
      ValueError: If lines are no such records; the first ones are listed.
    """
    return parse_records(file, functools.partial(_record, template=template))


def parse_records(file: Path, parse: Callable[[Any], _T]) -> list[_T]:
    """Reads an entry of `--data`, and parses each object of it.

    Args:
      file: JSON Lines, a table as for `read_table`, or a data set as for
        `dataset_files`.
      parse: Function from an object to a `Record`, or a tuple of several, which get
        their number; raises a `ValueError` for objects that cannot be used.

    Raises:
      ValueError: If objects cannot be used; the first ones are listed.
    """
    records, number = [], 0
    wrong: dict[str, list[int]] = {}  # By reason, the numbers of what is wrong.
    what = "row" if has_rows(file) else "line"
    for number, read in enumerate(_rows(file), 1):
        try:
            if (fields := read()) is not None:
                records.append(_numbered(parse(fields), number))
        except ValueError as error:  # JSONDecodeError is one.
            wrong.setdefault(str(error), []).append(number)
    if wrong:
        raise ValueError(
            f"--data '{file}': {_count(wrong)} of {number} {what}s cannot be used:\n  "
            + "\n  ".join(_listed(wrong, what))
        )
    if not records:
        raise ValueError(f"--data '{file}' has no records.")
    return records


def _count(wrong: dict[str, list[int]]) -> int:
    return sum(map(len, wrong.values()))


def _listed(wrong: dict[str, list[int]], what: str) -> Iterator[str]:
    """Yields the first reasons, each once, with the numbers that it is of."""
    for reason, numbers in list(wrong.items())[:_SHOWN]:
        more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
        yield f"{what} {numbers[0]}{more}: {reason}"
    if left := _count(dict(list(wrong.items())[_SHOWN:])):
        yield f"and {left} more"


def _numbered(parsed: Any, number: int) -> Any:
    if isinstance(parsed, tuple):
        return tuple(_numbered(each, number) for each in parsed)
    return dataclasses.replace(parsed, number=number)


def _rows(file: Path) -> Iterator[Callable[[], Any]]:
    """Yields what parses each record of an entry; None for an empty line."""
    if dataset_name(file) is None:
        yield from _rows_of_file(file)
        return
    for part in dataset_files(file):
        yield from _rows_of_file(part)


def _rows_of_file(file: Path) -> Iterator[Callable[[], Any]]:
    if is_table(file):
        yield from (functools.partial(_without_nulls, row) for row in read_table(file))
        return
    text = _read_text(file)
    if format_of(file.name) == ".json":
        objects = _objects(text, file)
        if objects is not None:
            yield from (functools.partial(_without_nulls, one) for one in objects)
            return
    # `splitlines` also splits at U+2028 and others, which a string of JSON may hold.
    lines = text.split("\n")
    for line in lines if lines[-1] else lines[:-1]:
        yield functools.partial(_parse, line)


def _objects(text: str, file: Path) -> list[Any] | None:
    """Returns the objects of an array, or the only one; None for JSON Lines."""
    try:
        found = _loads(text)
    except ValueError as error:
        if text.lstrip()[:1] == "[":
            raise ValueError(f"--data '{file}' is not JSON: {error}") from error
        return None
    return found if isinstance(found, list) else [found]


def _read_text(file: Path) -> str:
    try:
        if file.suffix.lower() == ".gz":
            return gzip.decompress(file.read_bytes()).decode("utf-8-sig")
        if file.suffix.lower() == ".zst":
            pyarrow = require("pyarrow", f"--data '{file}'")
            with pyarrow.input_stream(str(file), compression="zstd") as stream:
                return stream.read().decode("utf-8-sig")
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(
            f"--data '{file}' cannot be read: line {line} is not UTF-8: {error}"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"--data '{file}' cannot be read: {error}") from error


def _parse(line: str) -> Any:
    if not line.strip():
        return None
    return _without_nulls(_loads(line))


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deep") from error


def _without_nulls(fields: Any) -> dict[str, Any]:
    """Returns the fields of an object that are not null."""
    if not isinstance(fields, dict):
        raise ValueError("no JSON object")
    # A table has all columns in all rows, and so has the JSON that is made of one.
    return {name: value for name, value in fields.items() if value is not None}


def _record(fields: Any, template: ChatTemplate | None) -> Record:
    if not isinstance(fields, dict):
        raise ValueError("no JSON object")
    if {"chosen", "rejected"} <= fields.keys():
        raise ValueError(
            "a preference pair (chosen, rejected): train on it with --objective dpo "
            "or reward"
        )
    kinds = [kind for kind, keys in _KINDS.items() if keys <= fields.keys()]
    if len(kinds) != 1:
        raise ValueError(
            f"has {', '.join(fields) or 'no fields'}; give one of messages, prompt "
            "with completion, and text"
        )
    match kinds[0]:
        case "messages":
            return conversation_record(fields, template)
        case "prompt":
            return _completion(fields, template)
        case _:
            text = text_of(fields, "text")
            return Record(text, ((0, len(text)),))


def _completion(fields: Mapping[str, Any], template: ChatTemplate | None) -> Record:
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        # Conversations, of which the completion alone is trained.
        before = len(prompt)
        messages = [*prompt, *completion]
        return conversation_record({**fields, "messages": messages}, template, before)
    prompt, completion = text_of(fields, "prompt"), text_of(fields, "completion")
    text = prompt + completion
    return Record(text, ((len(prompt), len(text)),))


def conversation_record(
    fields: Mapping[str, Any], template: ChatTemplate | None, first: int = 0
) -> Record:
    """Returns the record of a conversation.

    Args:
      fields: Object with `messages`, and perhaps `tools`, a list or its JSON, and
        `chat_template_kwargs`, variables of the template.
      template: Chat template; None if the model has none.
      first: Number of messages that belong to the prompt.

    Raises:
      ValueError: If there are no such messages, or none of the assistant behind the
        prompt.
    """
    messages = fields["messages"]
    if messages == []:
        raise ValueError("messages is empty: give at least one of the assistant")
    listed = messages if isinstance(messages, list) else []
    roles = [m.get("role") if isinstance(m, dict) else None for m in listed]
    if not roles or not all(isinstance(role, str) for role in roles):
        raise ValueError(f"messages is a list of objects with a role: {_ROLES}")
    if template is None:
        raise ValueError(
            "messages need a chat template, and the model has none: add its "
            "chat_template.jinja, or use prompt and completion"
        )
    tools, options = (_decoded(fields, name, kind) for name, kind in _OF_TEMPLATE)
    if reserved := [name for name in options or () if name in _RESERVED]:
        raise ValueError(f"chat_template_kwargs has {', '.join(reserved)}")
    # transformers drops what is null too: templates ask whether a message has a field.
    messages = [_without_nulls(message) for message in messages]
    text, spans = template.render(messages, tools, first, options or {})
    if not spans:
        raise ValueError("has no message of the assistant to train on")
    return Record(text, tuple(spans), has_specials=True)


def _decoded(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    """Returns a field, which tables often hold as JSON; None if it is absent or blank.

    Args:
      fields: Object.
      name: Name of the field.
      kind: Type that it has.
    """
    value = fields.get(name)
    if isinstance(value, str):
        try:
            value = _loads(value) if value.strip() else None
        except ValueError as error:
            raise ValueError(f"{name} is a string, and no JSON: {error}") from error
    if not (value is None or isinstance(value, kind)):
        raise ValueError(f"{name} is a {type(value).__name__}, and no {kind.__name__}")
    return value


def text_of(fields: Mapping[str, Any], name: str) -> str:
    """Returns a field; raises a `ValueError` if it is not a string."""
    value = fields[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is not a string")
    return value
