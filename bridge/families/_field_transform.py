"""Fields of a config file that are not one to one with fields of ours."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from bridge.models import DecoderConfig


@dataclasses.dataclass(frozen=True)
class FieldTransform:
    """A way to read some fields of a config file, and to write them back.

    Args:
      names: The fields of the file that it reads.
      read: From all fields of the file, defaults filled in, to values of ours by
        dotted name (`"moe.n_group"`); raises a `ValueError` for what is not modelled.
      write: From our config to fields of the file, from which `read` makes the same.
      defaults: What transformers takes for those of the fields that a file need not
        say; `read` finds them filled in.
    """

    names: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    write: Callable[[DecoderConfig], dict[str, Any]]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
