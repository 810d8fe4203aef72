"""Checks a plan's parameters against the options that name or need some of them."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh

from fsdp_jax._tree import matches
from fsdp_jax.sharding._config import FSDPConfig
from fsdp_jax.sharding._nvfp4_gather import NVFP4Gather
from fsdp_jax.sharding._param_plan import ParamPlan
from fsdp_jax.sharding._units import ROOT


def check_params(config: FSDPConfig, mesh: Mesh, params: Sequence[ParamPlan]) -> None:
    """Checks that options do something, and that what they name is there.

    Args:
      config: Options of the plan.
      mesh: Device mesh of the plan.
      params: Plans of all parameters.

    Raises:
      ValueError: If an option has no effect, or names a dim or a stack that no
        parameter has; all offenders of one kind at once.
    """
    _check_units(mesh, config, params)
    _check_stacks(params)
    _check_dims(config, params)
    _check_tensor_parallel(mesh, params)


def _check_units(mesh: Mesh, config: FSDPConfig, params: Sequence[ParamPlan]) -> None:
    """Refuses options that have no parameter to apply to."""
    gather = config.mp_policy.param_gather
    is_split = any(p.placements.parameter or p.placements.optimizer for p in params)
    if gather and is_split and not any(param.gather for param in params):
        raise ValueError(
            f"MixedPrecisionPolicy(param_gather={gather}) is for matrices of units, "
            "and none is that large and not excluded. Pass units=[LayerClass], a "
            "smaller min_elements, or drop it."
        )
    odd = [
        f"'{p.name}' {p.shape}"
        for p in params
        if isinstance(p.gather, NVFP4Gather)
        and p.split.on_device(mesh, p.padded_shape, ())[p.block_dim] % 2
    ]
    if odd:
        raise ValueError(
            f"NVFP4Gather packs two elements a byte along a dim that data axes do not "
            f"split, and it is odd on a device for {', '.join(odd)}. Exclude these, or "
            "take MXFP8Gather."
        )
    if config.remat_policy is not None and all(p.unit == ROOT for p in params):
        raise ValueError(
            "FSDPConfig(remat_policy=...) decides what a unit saves for backward, and "
            "no parameter belongs to a unit. Pass units=[LayerClass], or drop it."
        )
    if config.lora is None and all(param.is_frozen for param in params):
        raise ValueError(
            f"FSDPConfig(frozen={config.frozen}) freezes all {len(params)} "
            "parameters: nothing is left to train. Leave some out."
        )


def _check_stacks(params: Sequence[ParamPlan]) -> None:
    short = [
        f"'{p.name}' {p.shape} has no {p.num_stacked} dims to be the stack of"
        for p in params
        if p.num_stacked > len(p.shape)
    ]
    if short:
        raise ValueError(
            f"{'; '.join(short)} its unit. Correct num_dims in fsdp_jax.Stacked."
        )


def _check_dims(config: FSDPConfig, params: Sequence[ParamPlan]) -> None:
    outside = [
        f"{pattern!r}: dim {dim} of '{p.name}', which has {p.ndim_in_unit} in its unit"
        for pattern, dim in config.tensor_parallel.items()
        for p in params
        if matches(pattern, p.name) and p.ndim_in_unit > 1
        if not -p.ndim_in_unit <= dim < p.ndim_in_unit
    ]
    if outside:
        raise ValueError(
            "FSDPConfig(tensor_parallel=...) names dims that are not there: "
            f"{'; '.join(outside)}."
        )


def _check_tensor_parallel(mesh: Mesh, params: Sequence[ParamPlan]) -> None:
    tp = mesh.shape["tp"]
    if tp > 1 and all(param.split.tensor_dim is None for param in params):
        raise ValueError(
            f"The mesh has tp={tp}, and FSDPConfig(tensor_parallel=...) splits nothing "
            "over it: a parameter of one dim that tp and data axes do not divide "
            "together is split over the latter alone. Name the matrices, or give these "
            "devices to dp_shard."
        )
    uneven = [
        f"'{p.name}' {p.shape}: dim {p.split.tensor_dim}"
        for p in params
        if p.split.tensor_dim is not None and p.shape[p.split.tensor_dim] % tp
    ]
    if uneven:
        raise ValueError(
            f"tp={tp} does not divide: {'; '.join(uneven)}. Split another dim in "
            "FSDPConfig(tensor_parallel=...), or use fewer devices on tp."
        )
