"""Input type of the transforms of Megatron's fields, and their error reporting."""

from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]
"""Fields of `TransformerConfig` and arguments of `GPTModel`, including defaults."""


def refuse(wrong: list[str]) -> None:
    """Raises a `ValueError` with the given lines, if there are any."""
    if wrong:
        raise ValueError("\n".join(wrong))
