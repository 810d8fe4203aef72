"""Units that the user names: their paths in the model and the parameters they own."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fsdp_jax._tree import matches, named_leaves
from fsdp_jax.sharding._model_def import Instance, ModelDef
from fsdp_jax.sharding._param_plan import ROOT, WHOLE


@dataclasses.dataclass(frozen=True)
class Stacked:
    """A unit whose leaves have leading dims over its copies, one slice of them a copy.

    Classes constructed under `vmap` are recognised. A tree of stacked arrays, as
    `fsdp.scan` takes it, has the shapes of plain matrices and must be marked:
    `units=[fsdp.Stacked("layers")]`.

    Args:
      unit: Class, method of a class, or path pattern.
      num_dims: Number of leading dims that are the stack; they are never split over
        data axes.

    Raises:
      ValueError: If `num_dims` is no integer, or less than 1.

    Examples:
      >>> plan = fsdp.fully_shard(make_model, mesh, units=[fsdp.Stacked("layers")])
      >>> {param.name: param.num_stacked for param in plan.param_plans}
      {'head': 0, 'layers.w': 1}
    """

    unit: type | str | Callable[..., Any]
    num_dims: int = 1

    def __post_init__(self):
        """Refuses a stack without a leading dim."""
        if not isinstance(self.num_dims, int) or self.num_dims < 1:
            raise ValueError(
                f"Stacked({self.unit!r}, num_dims={self.num_dims!r}): a stack has at "
                "least 1 leading dim. Leave Stacked out for what is not a stack."
            )


UnitSpec = type | str | Callable[..., Any] | Stacked
"""Class, path pattern, method of a class, or one of them in `Stacked`."""


Found = dict[str, int]
"""Path of a unit -> number of leading dims of its leaves that are the stack."""


def listed(units: Sequence[UnitSpec]) -> list[UnitSpec]:
    """Returns the units as a list.

    Raises:
      ValueError: If they are one unit, which would be iterated, or no list.
    """
    if isinstance(units, (str, Stacked)) or callable(units):
        shown = _name(units)
        raise ValueError(f"units={shown} is one unit: write units=[{shown}].")
    if units is None:
        raise ValueError(
            "units=None is not a list: leave it out to gather all parameters when the "
            "step begins, or name the layers, as in units=[Block]."
        )
    if not isinstance(units, Iterable):
        raise ValueError(
            f"units is a {type(units).__name__}, not a list. Name the layers, as in "
            "units=[Block]; a config is passed as config=..."
        )
    return list(units)


def find_units(
    units: Sequence[tuple[type | str, int | None]],
    instances: dict[type, tuple[Instance, ...]],
    names: Sequence[str],
) -> Found:
    """Returns the paths of all units.

    Args:
      units: Classes and path patterns, with the number of stacked dims where told.
      instances: Unit class -> its objects in the model.
      names: Names of the parameters.

    Raises:
      ValueError: If there are units that match nothing; all in one message.
    """
    found: Found = {}
    unmatched = []
    for unit, told in units:
        if isinstance(unit, type):
            hits = {i.path: told or i.num_stacked or 0 for i in instances.get(unit, ())}
        else:
            heads = (matches(unit, name) for name in names)
            hits = {head: told or 0 for head in heads if head is not None}
        if not hits:
            unmatched.append(unit)
        found.update(hits)
    if unmatched:
        raise ValueError(_no_such_unit(unmatched, names))
    return found


def owner(name: str, units: Found) -> tuple[str, int]:
    """Returns the innermost unit around a parameter, and its number of stacked dims."""
    above = [u for u in units if u == "" or name == u or name.startswith(u + ".")]
    if not above:
        return ROOT, 0
    unit = max(above, key=len)
    return unit or WHOLE, units[unit]


def check_stacks(model: ModelDef, units: Found) -> None:
    """Refuses linen stacks whose layers lie along another dim than the first."""
    wrong = []
    for name, leaf in named_leaves(model.params):
        _, num_stacked = owner(name, units)
        made = model.made.get(name, frozenset())
        slices = {s for s in made if len(s) == len(leaf.shape) - num_stacked}
        if num_stacked and slices and leaf.shape[num_stacked:] not in slices:
            wrong.append(f"{name} {leaf.shape}, of which a layer has {min(slices)}")
    if wrong:
        raise ValueError(
            "fsdp_jax.Stacked: layers are not stacked on the leading dim(s) of "
            f"{'; '.join(wrong)}. Use nn.scan(..., variable_axes={{'params': 0}}), or "
            "leave it out of `units`: it is then gathered at the entry of the loss."
        )


def _no_such_unit(unmatched: Sequence[type | str], names: Sequence[str]) -> str:
    shown = ", ".join(map(_name, unmatched))
    return (
        f"No part of the model matches the unit(s) {shown}. A class must be that of an "
        "nnx or equinox object in the model; a pattern must match the leading "
        f"components of parameter paths, which begin: {', '.join(names[:5])}."
    )


def _name(unit: Any) -> str:
    name = "__name__" if isinstance(unit, type) else "__qualname__"
    return getattr(unit, name, reprlib.repr(unit))
