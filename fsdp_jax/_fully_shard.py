"""From a model and a mesh to a plan: which dim of each parameter is split."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from fsdp_jax._config import ZERO_DP_STRATEGIES, FSDPConfig
from fsdp_jax._mesh import (
    OUTER_AXES,
    SHARD_AXES,
    axes_in_use,
    check_axes,
    num_devices,
)
from fsdp_jax._model import Instance, MakeModel, describe
from fsdp_jax._plan import ROOT, ParamPlan, Placements, Plan
from fsdp_jax._tree import matches, named_leaves


@dataclasses.dataclass(frozen=True)
class Stacked:
    """A unit whose leaves carry leading dims over its copies, one slice of them a copy.

    Classes constructed under `vmap` are recognised; a tree of stacked arrays, as
    `fsdp.scan` takes it, is not distinguishable from one of plain matrices and is
    marked: `units=[fsdp.Stacked("layers")]`.

    Args:
      unit: A class or a path pattern.
      num_dims: How many leading dims are the stack; they are never split.
    """

    unit: type | str
    num_dims: int = 1

    def __post_init__(self):
        """Refuses a stack without a dim."""
        if self.num_dims < 1:
            raise ValueError(
                f"Stacked({self.unit!r}, num_dims={self.num_dims}): a stack has at "
                "least 1 leading dim. Leave Stacked out for what is no stack."
            )


UnitSpec = type | str | Stacked


def fully_shard(
    make_model: MakeModel,
    mesh: Mesh,
    units: Sequence[UnitSpec] = (),
    config: FSDPConfig | None = None,
) -> Plan:
    """Plans a sharded model: which dim of each parameter is split, over which axes.

    No memory is taken; the model is traced abstractly. Each unit's weights are gathered
    when it is entered and let go when it is left. Where units nest, the innermost owns
    a parameter; what belongs to none is gathered once, at the entry of the loss.

    Args:
      make_model: Takes a PRNG key and returns an nnx or equinox module, linen
        variables, or any pytree of arrays.
      mesh: From `make_mesh`.
      units: Classes (flax.nnx, equinox), path patterns (`"layers.*"`: one `*` a path
        component, for linen modules and for functions marked with `fsdp.unit`), or
        either in `Stacked`. Empty: the model is one unit.
      config: Strategy, precision and what stays whole; default `FSDPConfig()`, ZeRO-3.

    Returns:
      The plan.

    Raises:
      ValueError: If the mesh is not one that can be planned for, a unit or a pattern
        matches nothing, or a parameter has no dim that the devices divide; all
        offenders in one message.

    Source: Megatron-FSDP `fully_shard_model`.
      FSDP2 splits dim 0 and pads; here the largest dim that divides is split, since JAX
      shards an array evenly or not at all.
    """
    config = config or FSDPConfig()
    check_axes(mesh)
    plain = [u.unit if isinstance(u, Stacked) else u for u in units]
    classes = tuple(dict.fromkeys(u for u in plain if isinstance(u, type)))
    model = describe(make_model, classes)
    names = [name for name, _ in named_leaves(model.params)]
    found = _find_units(units, model.instances, names)
    rows, indivisible = [], []
    for name, leaf in named_leaves(model.params):
        unit, num_stacked = _owner(name, found)
        row = _plan_param(name, leaf, unit, num_stacked, mesh, config)
        rows.append(row)
        if row.dim is None and _should_split(row, mesh, config):
            indivisible.append(row)
    _check(config, mesh, rows, indivisible)
    return Plan(mesh, config, make_model, model, tuple(rows), classes)


def choose_shard_dim(
    shape: tuple[int, ...], num_shards: int, *, num_stacked: int = 0
) -> int | None:
    """Picks the dim of a parameter that is split.

    The largest dim that divides wins, the leftmost on a tie, so that a shard is a few
    long ranges of a row-major file.

    Args:
      shape: Logical shape, e.g. `(layers, embed, mlp)`.
      num_shards: Devices that share the parameter.
      num_stacked: Leading dims that are scanned over and so cannot be split.

    Returns:
      The dim, or None if no dim divides.
    """
    divisible = [
        dim
        for dim, size in enumerate(shape)
        if dim >= num_stacked and size and size % num_shards == 0
    ]
    return max(divisible, key=lambda dim: shape[dim]) if divisible else None


def _plan_param(
    name: str,
    leaf: Any,
    unit: str,
    num_stacked: int,
    mesh: Mesh,
    config: FSDPConfig,
) -> ParamPlan:
    placements = _placements(mesh, config)
    whole = ParamPlan(
        name=name,
        shape=tuple(leaf.shape),
        unit=unit,
        num_stacked=num_stacked,
        dim=None,
        placements=Placements((), (), ()),
        precision=config.mp_policy.resolve(leaf.dtype),
        reshard=config.reshard_after_forward and unit != ROOT,
        remat_policy=config.remat_policy,
    )
    if not _should_split(whole, mesh, config):
        return whole
    num_shards = num_devices(mesh, placements.optimizer)
    dim = choose_shard_dim(whole.shape, num_shards, num_stacked=num_stacked)
    if dim is None:
        return whole
    return dataclasses.replace(whole, dim=dim, placements=placements)


def _placements(mesh: Mesh, config: FSDPConfig) -> Placements:
    """The preset that the strategies name."""
    inner = axes_in_use(mesh, SHARD_AXES)
    outer = axes_in_use(mesh, OUTER_AXES)
    strategy = ZERO_DP_STRATEGIES.index(str(config.zero_dp_strategy))
    hybrid = config.outer_dp_sharding_strategy == "optim"
    return Placements(
        parameter=inner if strategy >= 3 else (),
        gradient=inner if strategy >= 2 else (),
        # Inner first: the outer gather then brings contiguous pieces together.
        optimizer=(inner if strategy >= 1 else ()) + (outer if hybrid else ()),
    )


def _should_split(row: ParamPlan, mesh: Mesh, config: FSDPConfig) -> bool:
    """False for scalars, and for what the config or the mesh leaves whole."""
    return (
        row.ndim_in_unit > 0
        and math.prod(row.shape) > 0
        and num_devices(mesh, _placements(mesh, config).optimizer) > 1
        and math.prod(row.shape) >= config.min_shard_elements
        and not any(matches(p, row.name) for p in config.replicated)
    )


Found = dict[str, int]
"""Path of a unit -> leading dims of its leaves that are the stack."""


def _find_units(
    units: Sequence[UnitSpec],
    instances: dict[type, tuple[Instance, ...]],
    names: Sequence[str],
) -> Found:
    found: Found = {}
    unmatched = []
    for spec in units:
        unit = spec.unit if isinstance(spec, Stacked) else spec
        told = spec.num_dims if isinstance(spec, Stacked) else None
        if isinstance(unit, type):
            hits = {i.path: told or i.num_stacked or 0 for i in instances[unit]}
        else:
            heads = (matches(unit, name) for name in names)
            hits = {head: told or 0 for head in heads if head is not None}
        if not hits:
            unmatched.append(unit)
        found.update(hits)
    if unmatched:
        raise ValueError(_no_such_unit(unmatched, names))
    return found


def _owner(name: str, units: Found) -> tuple[str, int]:
    """The innermost unit above a parameter."""
    above = [u for u in units if u == "" or name == u or name.startswith(u + ".")]
    if not above:
        return ROOT, 0
    unit = max(above, key=len)
    return unit or "model", units[unit]


def _no_such_unit(unmatched: Sequence[type | str], names: Sequence[str]) -> str:
    shown = ", ".join(u.__name__ if isinstance(u, type) else repr(u) for u in unmatched)
    return (
        f"No part of the model matches the unit(s) {shown}. A class must be that of an "
        "nnx or equinox object in the model; a pattern must match the leading "
        f"components of parameter paths, which begin: {', '.join(names[:5])}."
    )


def _check(
    config: FSDPConfig,
    mesh: Mesh,
    rows: Sequence[ParamPlan],
    indivisible: Sequence[ParamPlan],
) -> None:
    names = [row.name for row in rows]
    if config.remat_policy is not None and all(row.unit == ROOT for row in rows):
        raise ValueError(
            "FSDPConfig(remat_policy=...) decides what a unit saves for backward, and "
            "no parameter belongs to a unit. Pass units=[LayerClass], or drop it."
        )
    unused = [
        p for p in config.replicated if not any(matches(p, name) for name in names)
    ]
    if unused:
        raise ValueError(
            f"FSDPConfig(replicated=...) has patterns that match no parameter: "
            f"{', '.join(map(repr, unused))}. Parameter paths begin: "
            f"{', '.join(names[:5])}."
        )
    if indivisible:
        num_shards = num_devices(mesh, _placements(mesh, config).optimizer)
        raise ValueError(
            "\n".join(_indivisible(row, num_shards) for row in indivisible)
        )


def _indivisible(row: ParamPlan, num_shards: int) -> str:
    start = row.num_stacked
    dim = max(range(start, len(row.shape)), key=lambda d: row.shape[d])
    size = row.shape[dim]
    padded = -(-size // num_shards) * num_shards
    return (
        f"Cannot shard '{row.name}' of shape {row.shape}: it is split over "
        f"{num_shards} devices, and {num_shards} divides none of its dims"
        f"{' after the stacked ones' if start else ''}. Either pad dim {dim} from "
        f"{size} to {padded}, or keep it whole with replicated=('{row.name}',) "
        f"({math.prod(row.shape):,} elements on every device)."
    )
