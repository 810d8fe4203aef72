"""Methods by which the objects of a class enter their unit."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flax import nnx

Methods = frozenset[str] | None
"""Names of the methods that enter a unit; None for all that its class defines."""

UnitClasses = Mapping[type, Methods]
"""Classes whose objects are units, and the methods that enter them."""


def resolve_methods(units: Sequence[Any]) -> tuple[list[Any], dict[type, Methods]]:
    """Replaces methods among unit specs by the classes that define them.

    Args:
      units: Classes, path patterns and methods, none of them in `Stacked`.

    Returns:
      `units` with classes in place of methods; and the classes, with the methods that
      enter them.

    Raises:
      ValueError: If no nnx or equinox class defines a method.
    """
    found: dict[type, Methods] = {}
    resolved: list[Any] = []
    unknown: list[str] = []
    for spec in units:
        cls, name = spec, None
        if not isinstance(spec, (type, str)):
            cls, name = _definition_of(spec) or (None, None)
        if cls is None:
            unknown.append(getattr(spec, "__qualname__", reprlib.repr(spec)))
        else:
            resolved.append(cls)
        if isinstance(cls, type) and issubclass(cls, _roots()):
            before = found.get(cls, frozenset())
            named = None if name is None or before is None else before | {name}
            found[cls] = named
    if unknown:
        raise ValueError(
            f"No nnx or equinox class defines the unit(s) {', '.join(unknown)}. A unit "
            "is a class, a method of a class (units=[Encoder.encode]) or a path "
            'pattern (units=["layers.*"]); a function of weights is marked with '
            "fsdp_jax.unit, and its path is the unit."
        )
    return resolved, found


@functools.cache
def methods_of(cls: type, chosen: Methods) -> dict[str, Callable[..., Any]]:
    """Returns the methods of a class that enter its unit, by name.

    Without a choice these are `__call__` and all methods but those of the framework's
    base class, magic ones, class and static methods, and generators, whose bodies run
    after they return.

    Args:
      cls: Class of a unit's objects.
      chosen: Names that the user chose; None for all.
    """
    if chosen is not None:
        return {name: getattr(cls, name) for name in chosen}
    names = [name for base in _own_bases(cls) for name in vars(base)]
    return {name: getattr(cls, name) for name in names if _is_method(cls, name)}


def subclasses(cls: type) -> Iterator[type]:
    """Yields the subclasses of a class, and theirs."""
    for one in type.__subclasses__(cls):
        yield one
        yield from subclasses(one)


def _own_bases(cls: type) -> list[type]:
    """Returns the classes in the MRO that are not those of a framework's base class."""
    inherited = {c for root in _roots() if issubclass(cls, root) for c in root.__mro__}
    return [base for base in cls.__mro__ if base not in {*inherited, object}]


def _is_method(cls: type, name: str) -> bool:
    if name == "__call__":
        return True
    if dataclasses.is_dataclass(cls) and name in cls.__dataclass_fields__:
        return False  # A function as the default of a field.
    held = inspect.getattr_static(cls, name)
    return (
        not (name.startswith("__") and name.endswith("__"))
        and inspect.isfunction(held)
        and not inspect.isgeneratorfunction(held)
    )


def _definition_of(method: Any) -> tuple[type, str] | None:
    """Returns the class that defines a method, and the method's name in it."""
    if not callable(method):
        return None
    for root in _roots():
        for cls in (root, *subclasses(root)):
            for name, held in vars(cls).items():
                if held is method:
                    return cls, name
    return None


def _roots() -> tuple[type, ...]:
    equinox = sys.modules.get("equinox")
    return (nnx.Module, equinox.Module) if equinox else (nnx.Module,)
