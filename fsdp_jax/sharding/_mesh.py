"""Device mesh with one axis for every kind of parallelism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

AXES = ("pp", "dp_outer", "dp_shard", "ep", "cp", "tp")
"""Axes of the mesh, outermost first: neighbours on the last have the fastest links."""

BATCH_AXES = ("dp_outer", "dp_shard", "ep")
"""Axes over which the rows of a batch are split."""

SEQUENCE_AXES = ("cp",)
"""Axes over which the sequence of a row is split."""

DATA_AXES = (*BATCH_AXES, *SEQUENCE_AXES)
"""Axes over which a gradient is summed: no two ranks on them see the same tokens."""

OUTER_AXES = ("dp_outer",)
"""Axes over which the sharded model is replicated, and which HFSDP splits further."""

SHARD_AXES = ("dp_shard", "ep", "cp")
"""Axes that split a dense parameter."""


def make_mesh(
    *,
    pp: int = 1,
    dp_outer: int = 1,
    dp_shard: int = -1,
    ep: int = 1,
    cp: int = 1,
    tp: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Makes the mesh that `fully_shard` plans for.

    The mesh always has all six axes, so that code need not check whether one exists; an
    axis of size 1 costs nothing. `make_mesh()` puts every device on `dp_shard`, and
    `make_mesh(dp_outer=2)` is HSDP: sharded within each half, replicated across. At
    most one size may be -1: the number of devices that the other sizes leave.

    Args:
      pp: Number of pipeline stages.
      dp_outer: Number of replicas (HSDP) or outer shards (HFSDP) of the sharded model.
      dp_shard: Number of devices that split parameters, gradients and optimizer state;
        by default all that the other sizes leave.
      ep: Number of devices that split experts; dense parameters and batch rows are
        split there too.
      cp: Number of devices that split the sequence.
      tp: Number of devices that split single matrix products.
      devices: Devices to use; None for all.

    Returns:
      A `jax.sharding.Mesh` of axis type Auto, with the axes `pp`, `dp_outer`,
      `dp_shard`, `ep`, `cp` and `tp`.

    Raises:
      ValueError: If the product of the sizes is not the number of devices, a size is no
        integer, or there are no devices.

    Examples:
      >>> dict(fsdp.make_mesh(dp_outer=2).shape)  # on 8 devices
      {'pp': 1, 'dp_outer': 2, 'dp_shard': 4, 'ep': 1, 'cp': 1, 'tp': 1}
    """
    if isinstance(devices, int):
        raise ValueError(
            f"devices={devices} is a number: pass jax.devices()[:{devices}]."
        )
    if (dims := getattr(devices, "ndim", 1)) != 1:
        raise ValueError(
            f"devices is an array of {dims} dims: pass a flat sequence; the sizes "
            "(dp_shard, tp, ...) say how it is laid out."
        )
    devices = list(jax.devices() if devices is None else devices)
    if not devices:
        raise ValueError("devices=[]: a mesh has at least 1 device.")
    asked = {"pp": pp, "dp_outer": dp_outer, "dp_shard": dp_shard}
    asked |= {"ep": ep, "cp": cp, "tp": tp}
    sizes = _fill_in(asked, len(devices))
    return jax.make_mesh(
        tuple(sizes.values()),
        AXES,
        # jax.make_mesh defaults to Explicit, under which constraints raise.
        axis_types=(AxisType.Auto,) * len(AXES),
        devices=devices,
    )


def axes_in_use(mesh: Mesh, axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the `axes` that have more than one device, in the same order."""
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def num_devices(mesh: Mesh, axes: Sequence[str]) -> int:
    """Returns the number of devices along `axes` together."""
    return math.prod(mesh.shape[axis] for axis in axes)


def check_axes(
    mesh: Mesh, *, tensor_parallel: bool = False, context_parallel: bool = False
) -> None:
    """Raises a `ValueError` unless `fully_shard` can plan for `mesh`.

    Args:
      mesh: Device mesh.
      tensor_parallel: True if parameters are split over `tp`.
      context_parallel: True if rows of a batch are split over `cp`.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(
            f"A {type(mesh).__name__} is no mesh: make one with fsdp_jax.make_mesh, "
            "which takes devices=."
        )
    missing = [axis for axis in AXES if axis not in mesh.shape]
    if missing:
        raise ValueError(
            f"The mesh has axes {tuple(mesh.shape)}, without {', '.join(missing)}. "
            "Make it with fsdp_jax.make_mesh, which has every axis (size 1 is free)."
        )
    used = {"tp": tensor_parallel, "cp": context_parallel}
    unused = [
        axis for axis in ("cp", "tp") if mesh.shape[axis] > 1 and not used.get(axis)
    ]
    if unused:
        sizes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in unused)
        raise ValueError(
            f"The mesh has {sizes}, but parameters are planned for dp_outer, dp_shard "
            "and ep, for tp if FSDPConfig(tensor_parallel=...) says which dims, and "
            "for cp if FSDPConfig(context_parallel=...) says which dim of a batch is "
            "the sequence, so these devices would repeat each other's work. Give them "
            "to dp_shard."
        )


def _fill_in(asked: dict[str, int], available: int) -> dict[str, int]:
    shown = ", ".join(f"{axis}={size!r}" for axis, size in asked.items() if size != 1)
    if any(not isinstance(size, int | np.integer) for size in asked.values()):
        raise ValueError(f"Cannot make a mesh of {shown}: each size is an integer.")
    bad = [axis for axis, size in asked.items() if size < 1 and size != -1]
    open_axes = [axis for axis, size in asked.items() if size == -1]
    if bad or len(open_axes) > 1:
        raise ValueError(
            f"Cannot make a mesh of {shown}: sizes are at least 1, and at most one may "
            "be -1 (whatever the others leave)."
        )
    fixed = math.prod(size for size in asked.values() if size != -1)
    if available % fixed or (not open_axes and fixed != available):
        reason = "does not divide" if open_axes else "is not"
        raise ValueError(
            f"Cannot make a mesh of {shown or 'size 1'}: the product {fixed} {reason} "
            f"the number of devices, {available}. Change a size, leave one at -1, or "
            "pass devices=jax.devices()[:n]."
        )
    return {a: available // fixed if s == -1 else s for a, s in asked.items()}
