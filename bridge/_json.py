"""JSON from strangers: one object, each key once."""

import json
from typing import Any


def parse_json(text: bytes, subject: str) -> dict[str, Any]:
    """Parses a JSON object, refusing the ambiguities that Python lets pass.

    Args:
      text: The bytes of the object.
      subject: What it is, to begin the error message.

    Raises:
      ValueError: If it is not one JSON object with each key given once.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{subject} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{subject} is a JSON {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(
            f"keys given twice: {sorted(k for k in seen if keys.count(k) > 1)}"
        )
    return seen
