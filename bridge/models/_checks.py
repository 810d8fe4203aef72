"""Validation of a config's fields against their annotations."""

import dataclasses
import functools
import math
import types
import typing
from typing import Any, Literal


def wrong_fields(config: Any) -> list[str]:
    """Returns messages for fields whose value does not match their annotation.

    Config files are untrusted: `"false"` is a truthy string, `NaN` a number, and
    `True` an integer, and each would silently be computed with.

    Args:
      config: Dataclass to check. An `int` is accepted as `float`; floats must be
        finite, and `bool` is not accepted as a number.

    Returns:
      One message per invalid field; sizes are checked by `wrong_sizes`.
    """
    hints = _hints(type(config))
    return [
        f"{field.name} is {value!r}, not {_describe(hints[field.name])}"
        for field in dataclasses.fields(config)
        if not _allows(hints[field.name], value := getattr(config, field.name))
    ]


def wrong_sizes(config: Any, names: tuple[str, ...]) -> list[str]:
    """Returns messages for those of the named integer fields that are not positive."""
    return [
        f"{name} is {value!r}, not a positive integer"
        for name in names
        if isinstance(value := getattr(config, name), int) and value < 1
    ]


def raise_if(subject: str, wrong: list[str]) -> None:
    """Raises a `ValueError` that lists the messages, if there are any."""
    if wrong:
        raise ValueError(f"{subject}:\n" + "\n".join(f"  {line}" for line in wrong))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _allows(hint: Any, value: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_allows(arg, value) for arg in args)
    if origin is Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if origin is tuple:
        if args[-1] is Ellipsis and isinstance(value, tuple):
            return all(_allows(args[0], item) for item in value)
        return (
            isinstance(value, tuple)
            and len(value) == len(args)
            and all(map(_allows, args, value))
        )
    if hint is Any:
        return True
    if hint is float:
        # bool is a subclass of int, and not accepted as a number here.
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(repr(arg) for arg in typing.get_args(hint))
    names = {int: "an integer", float: "a finite number", bool: "true or false"}
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return " or ".join(map(_describe, kinds))
    return names.get(hint) or getattr(hint, "__name__", str(hint))
