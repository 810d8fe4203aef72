"""Adapters: the rules of one layer, said by the layer's name."""

import dataclasses
from collections.abc import Mapping

from bridge.adapt._derived import Derived
from bridge.rules._rules import Rule


@dataclasses.dataclass(frozen=True)
class Adapter:
    """What one layer of PyTorch and its counterpart in JAX have in common.

    Args:
      rules: Which tensors are which leaves.
      derived: Tensors that the rules name and that are more than a layout away.
      ignore: Tensors that have no counterpart and need none.
      sizes: Sizes of dims that shapes alone do not tell.
    """

    rules: tuple[Rule, ...]
    derived: tuple[Derived, ...] = ()
    ignore: tuple[str, ...] = ()
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)


def at(path: str, name: str) -> str:
    """Returns the path of a leaf of a module; the path of the model itself is empty."""
    return f"{path}.{name}" if path else name


def spatial(ndim: int) -> str:
    """Returns names for the spatial dims of a layout."""
    return " ".join(f"s{dim}" for dim in range(ndim))
