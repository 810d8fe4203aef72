"""Types of options, checked before anything is made of them.

A string is true, `True` is a number, and a file of options holds both: each would be
computed with, or fail far from where it was written.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

_Union = (types.UnionType, typing.Union)


def is_whole(value: Any) -> bool:
    """Returns whether a value is a whole number: of any type but bool."""
    return hasattr(value, "__index__") and not isinstance(value, bool | np.bool_)


def check_options(options: Any) -> None:
    """Refuses options whose values have another type than their annotation.

    Booleans, numbers, literals, other dataclasses, mappings of them, and None where it
    is named are checked; of other annotations anything is accepted.

    Args:
      options: Dataclass of options.

    Raises:
      ValueError: If values have other types; lists all of them.
    """
    kind = type(options)
    hints = _hints(kind)
    wrong = [
        f"{field.name}={value!r} must be {_described(hints[field.name])}"
        for field in dataclasses.fields(options)
        if not _allows(hints[field.name], value := getattr(options, field.name))
    ]
    if wrong:
        raise ValueError(f"{kind.__name__}: {'; '.join(wrong)}.")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _allows(hint: Any, value: Any) -> bool:
    args = typing.get_args(hint)
    if typing.get_origin(hint) in _Union:
        return any(_allows(arg, value) for arg in args)
    if typing.get_origin(hint) is Literal:
        return value in args
    if typing.get_origin(hint) is Mapping:
        return isinstance(value, Mapping) and all(
            _allows(args[0], key) and _allows(args[1], item)
            for key, item in value.items()
        )
    if hint is bool:
        return isinstance(value, bool | np.bool_)
    if hint is int:
        return is_whole(value)
    if hint is float:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        return is_number and math.isfinite(value)
    if isinstance(hint, type):
        is_checked = hint in (str, types.NoneType) or dataclasses.is_dataclass(hint)
        return isinstance(value, hint) or not is_checked
    return True


def _described(hint: Any) -> str:
    args = typing.get_args(hint)
    if typing.get_origin(hint) in _Union:
        return " or ".join(map(_described, args))
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if typing.get_origin(hint) is Mapping:
        return f"a mapping from {_described(args[0])} to {_described(args[1])}"
    names = {
        bool: "True or False",
        int: "a whole number",
        float: "a finite number",
        str: "a string",
        types.NoneType: "None",
    }
    return names.get(hint) or f"of type {getattr(hint, '__name__', hint)}"
