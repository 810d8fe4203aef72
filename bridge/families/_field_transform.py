"""Fields of `config.json` that are not one to one with fields of `DecoderConfig`.

In the tables of families, too, "ours" is a field of `bridge.models.DecoderConfig`, by
its dotted name (`"moe.n_group"`), and "the file" is `config.json`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from bridge.models import DecoderConfig


@dataclasses.dataclass(frozen=True)
class FieldTransform:
    """Reads some fields of `config.json` into a `DecoderConfig`, and writes them back.

    Args:
      names: The fields of the file that it reads.
      read: From all fields of the file, defaults filled in, to values of
        `DecoderConfig` by dotted name; raises a `ValueError` for what is not modelled.
      write: From a `DecoderConfig` to fields of the file, from which `read` makes the
        same values.
      defaults: What transformers takes for those of the fields that a file need not
        say; `read` finds them filled in.
    """

    names: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    write: Callable[[DecoderConfig], dict[str, Any]]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
