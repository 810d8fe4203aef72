"""Codecs of Megatron's fields: what they read, and how they say what cannot be."""

from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]
"""Fields of a `TransformerConfig` and arguments of `GPTModel`, defaults filled in."""


def refuse(wrong: list[str]) -> None:
    """Raises a `ValueError` of these lines, if there are any."""
    if wrong:
        raise ValueError("\n".join(wrong))
