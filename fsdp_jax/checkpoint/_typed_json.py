"""JSON that gives back what it was given: tuples, bytes, and keys that are no strings.

Never pickle: a checkpoint comes from elsewhere, and to read it must run nothing.
"""

from __future__ import annotations

import base64
from typing import Any

_TUPLE, _BYTES, _ITEMS = "__tuple__", "__bytes__", "__items__"
_TAGS = {_TUPLE, _BYTES, _ITEMS}


def encode(value: Any) -> Any:
    """The value in types of JSON.

    Args:
      value: None, bool, int, float, str, bytes, and lists, tuples and dicts of them.

    Raises:
      ValueError: If there is anything else in it; all offenders in one message.
    """
    problems: list[str] = []
    encoded = _encode(value, "metadata", problems)
    if problems:
        raise ValueError(
            f"Cannot save {len(problems)} value(s) as JSON:\n  "
            + "\n  ".join(problems)
            + "\nMake them numbers, strings, bytes, lists, tuples or dicts."
        )
    return encoded


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"__tuple__": items}:
            return tuple(decode(item) for item in items)
        case {"__bytes__": text}:
            return base64.b64decode(text)
        case {"__items__": pairs}:
            return {decode(key): decode(item) for key, item in pairs}
    return {key: decode(item) for key, item in value.items()}


def _encode(value: Any, where: str, problems: list[str]) -> Any:
    # By exact type: a subclass (numpy's float64, an enum) would come back as its base.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is bytes:
        return {_BYTES: base64.b64encode(value).decode()}
    if type(value) in (list, tuple):
        items = [_encode(x, f"{where}[{i}]", problems) for i, x in enumerate(value)]
        return items if type(value) is list else {_TUPLE: items}
    if type(value) is dict:
        return _encode_dict(value, where, problems)
    problems.append(f"{where}: {type(value).__name__}")
    return None


def _encode_dict(value: dict, where: str, problems: list[str]) -> dict[str, Any]:
    items = {key: _encode(x, f"{where}[{key!r}]", problems) for key, x in value.items()}
    if all(type(key) is str and key not in _TAGS for key in items):
        return items
    keys = [_encode(key, f"key {key!r} of {where}", problems) for key in items]
    return {_ITEMS: [list(pair) for pair in zip(keys, items.values(), strict=True)]}
