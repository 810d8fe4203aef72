"""Strict parsing of untrusted JSON: one object, unique keys, finite numbers."""

import codecs
import functools
import json
import math
from pathlib import Path
from typing import Any, NoReturn

from bridge.formats._other_formats import describe_content
from bridge.formats._regular_file import check_regular_file

INFINITE = frozenset({"time_step_limit"})
"""Fields of configs that may be infinite: the longest time step of Mamba 2."""

# The indices of the largest models have a few megabytes.
_MAX_BYTES = 100_000_000


def read_json(
    path: Path, subject: str, infinite: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Reads a file that holds one JSON object; see `parse_json`.

    Raises:
      FileNotFoundError: If there is no such file.
      ValueError: If it is not a regular file, is larger than 100 MB, or is not one
        valid JSON object.
    """
    check_regular_file(path)
    if (size := path.stat().st_size) > _MAX_BYTES:
        raise ValueError(
            f"{subject} has {size:,} bytes; at most {_MAX_BYTES:,} are accepted."
        )
    # A byte order mark, which editors of Windows write, is no part of the text.
    text = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    return parse_json(text, subject, infinite)


def parse_json(
    text: bytes, subject: str, infinite: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Parses a JSON object, and rejects nonstandard JSON that Python accepts.

    NaN and infinities, literal or from a too large exponent, would become sizes and
    constants of a model; a duplicate key would lose one of its values; an unpaired
    surrogate cannot be printed or written.

    Args:
      text: Bytes of the object, in UTF-8.
      subject: Description of the object, to begin the error message.
      infinite: Names of fields whose value, or one in a list, may be `Infinity`, which
        Python writes though JSON has no such number.

    Raises:
      ValueError: If it is not one JSON object with unique keys.
    """
    try:
        value = json.loads(
            text.decode(),
            object_pairs_hook=functools.partial(_object, infinite=infinite),
            parse_constant=_constant if infinite else _refuse,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        advice = describe_content(text[:64])
        raise ValueError(
            f"{subject} is not valid JSON: {error}. {advice}".rstrip()
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{subject} is a JSON {type(value).__name__}, not an object")
    return value


def _object(pairs: list[tuple[str, Any]], infinite: frozenset[str]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) < len(pairs):
        raise ValueError(f"keys given twice: {_twice([key for key, _ in pairs])}")
    for text in (*seen, *(v for v in seen.values() if isinstance(v, str))):
        text.encode()  # raises on an unpaired surrogate
    if infinite:
        for key in seen.keys() - infinite:
            _check_finite(seen[key])
    return seen


def _check_finite(value: Any) -> None:
    """Checks a number, or those of a list; of objects their own fields are checked."""
    if isinstance(value, list):
        for item in value:
            _check_finite(item)
    if isinstance(value, float) and math.isinf(value):
        _refuse("-Infinity" if value < 0 else "Infinity")


def _twice(keys: list[str]) -> list[str]:
    seen: set[str] = set()
    return sorted({key for key in keys if key in seen or seen.add(key)})


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _constant(text: str) -> float:
    if text == "NaN":
        _refuse(text)
    return float(text)  # an infinity, which a field may have or not


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is larger than any float")
    return value
