"""Names of config fields that transformers knows, by `model_type`.

`PYTHONPATH=tests python tests/helpers/transformers_fields.py` writes them to
transformers_fields.json, from the transformers that is installed.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def _read() -> dict[str, Any]:
    file = resources.files("bridge.families") / "transformers_fields.json"
    return json.loads(file.read_text(encoding="utf-8"))


_NAMES = _read()

COMMON = frozenset(_NAMES["common"].split())
"""Fields that all models know."""

ROPE_KEYS = frozenset(_NAMES["rope_keys"].split())
"""Keys that `rope_parameters` may have in any model."""

BY_MODEL_TYPE = {
    name: frozenset(names.split()) for name, names in _NAMES["by_model_type"].items()
}
"""Model type -> fields that it knows besides."""
