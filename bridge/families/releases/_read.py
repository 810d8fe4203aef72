"""Parts of the tables of releases, which are read and never written."""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families._family import Field
from bridge.families._field_transform import FieldTransform

Fields = Mapping[str, Any]


def reads(
    read: Callable[[Fields], dict[str, Any]], defaults: Mapping[str, Any]
) -> FieldTransform:
    """Returns a transform of fields that an export does not have.

    Args:
      read: As `FieldTransform.read`.
      defaults: The fields, with what the code of the release takes for them.
    """
    return FieldTransform(tuple(defaults), read, lambda config: {}, defaults)


def said(**wanted: Any) -> FieldTransform:
    """Returns a transform of fields of which one value is modelled, and has to be said.

    The code of the release takes another where the file does not say.
    """

    def read(fields: Fields) -> dict[str, Any]:
        if wrong := [name for name, v in wanted.items() if fields[name] != v]:
            lines = (
                f"{n} = {fields[n]!r}: only {wanted[n]!r} is modelled" for n in wrong
            )
            raise ValueError("\n".join(lines))
        return {}

    return reads(read, dict.fromkeys(wanted))


def without(fields: Mapping[str, Field], *names: str) -> dict[str, Field]:
    """Returns the fields of a family but some, which the release says otherwise."""
    return {name: field for name, field in fields.items() if name not in names}


def one_for_all(name: str, value: Any) -> Any:
    """Returns the value of all layers, of which a file may hold a list.

    Raises:
      ValueError: If the layers differ.
    """
    if not isinstance(value, list | tuple):
        return value
    if not value or any(other != value[0] for other in value):
        raise ValueError(
            f"{name} = {value!r}: only one value for all layers is modelled"
        )
    return value[0]
