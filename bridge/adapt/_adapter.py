"""Adapters: the rules of one layer."""

import dataclasses
from collections.abc import Mapping

from bridge.adapt._derived import Derived
from bridge.rules._rules import Rule


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Correspondence of one PyTorch layer and its JAX counterpart.

    Args:
      rules: Rules from tensors to leaves.
      derived: Tensors named by the rules that need more than a layout.
      ignore: Names of tensors without a counterpart.
      sizes: Sizes of dims that cannot be inferred from shapes.
    """

    rules: tuple[Rule, ...]
    derived: tuple[Derived, ...] = ()
    ignore: tuple[str, ...] = ()
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)


def at(path: str, name: str) -> str:
    """Returns the path of a module's leaf; `path` is empty for the model itself."""
    return f"{path}.{name}" if path else name


def spatial(ndim: int) -> str:
    """Returns names for the spatial dims of a layout."""
    return " ".join(f"s{dim}" for dim in range(ndim))
