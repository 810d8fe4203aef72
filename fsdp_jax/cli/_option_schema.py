"""JSON schema of a command's options, for editors and for checks of run files."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docstring_parser

Schema = dict[str, Any]

_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string"}


def schema_of(command: type) -> Schema:
    """Returns the schema of a run file, with the help of each option.

    Args:
      command: Dataclass of a command; a field that is a dataclass is a section.
    """
    doc = docstring_parser.parse(command.__doc__ or "")
    texts = {param.arg_name: param.description for param in doc.params}
    hints = typing.get_type_hints(command)
    properties = {
        field.name: _describe(_schema(hints[field.name]), texts.get(field.name))
        for field in dataclasses.fields(command)
    }
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _describe(schema: Schema, text: str | None) -> Schema:
    return {**schema, "description": " ".join(text.split())} if text else schema


def _schema(hint: Any) -> Schema:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return schema_of(hint)
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if hint is Path:
        return {"type": "string"}
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(parts)}
    if origin is tuple:
        item = _schema(parts[0])
        return {"anyOf": [item, {"type": "array", "items": item}]}
    if origin in (typing.Union, types.UnionType):  # Not given, or a value.
        (given,) = (part for part in parts if part is not type(None))
        return _schema(given)
    raise TypeError(f"No option has the type {hint}.")


def problems(value: Any, schema: Schema, where: str) -> Iterator[str]:
    """Yields what is wrong with a value, in one line each.

    Args:
      value: Value as YAML or JSON reads it.
      schema: Schema from `schema_of`, or a part of it.
      where: Name of the value, for the messages.
    """
    if "anyOf" in schema:
        one, many = schema["anyOf"]
        yield from problems(value, many if isinstance(value, list) else one, where)
    elif "enum" in schema:
        if value not in schema["enum"]:
            choices = ", ".join(map(str, schema["enum"]))
            yield f"{where}: {value!r} is none of {choices}"
    elif schema["type"] == "array":
        for index, item in enumerate(value):
            yield from problems(item, schema["items"], f"{where}[{index}]")
    elif not _is(value, schema["type"]):
        yield f"{where}: {value!r} is not a {schema['type']}"


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return not isinstance(value, bool) and _is_number(value)
        case _:
            return isinstance(value, str)


def _is_number(value: Any) -> bool:
    try:  # YAML 1.1 takes 1e-4, without a point, for a string.
        float(value)
    except (TypeError, ValueError):
        return False
    return True
