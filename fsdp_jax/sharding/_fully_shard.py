"""Planning: chooses for each parameter of a model the dim that is split over a mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from fsdp_jax._tree import matches, named_leaves, unmatched
from fsdp_jax.sharding._adapted_model import with_lora
from fsdp_jax.sharding._attributes import check_make_model
from fsdp_jax.sharding._config import FSDPConfig, Placements
from fsdp_jax.sharding._expert_parallel import check_experts, expert_dim, without_ep
from fsdp_jax.sharding._mesh import DATA_AXES, axes_in_use, check_axes, num_devices
from fsdp_jax.sharding._model_def import MakeModel, ModelDef, describe
from fsdp_jax.sharding._offload import check_memory
from fsdp_jax.sharding._param_gather import ParamGather
from fsdp_jax.sharding._param_plan import ROOT, ParamKind, ParamPlan, UnitPolicy
from fsdp_jax.sharding._param_split import ParamSplit
from fsdp_jax.sharding._placement import (
    beside_stages,
    is_within,
    placements_of,
    staged_stack,
)
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.sharding._precision import Precision
from fsdp_jax.sharding._stages import Stages
from fsdp_jax.sharding._streaming import streamed, streams
from fsdp_jax.sharding._unit_methods import resolve_methods
from fsdp_jax.sharding._units import (
    Stacked,
    UnitSpec,
    check_stacks,
    find_units,
    listed,
    owner,
)
from fsdp_jax.sharding._validation import check_params


def fully_shard(
    make_model: MakeModel,
    mesh: Mesh,
    units: Sequence[UnitSpec] = (),
    config: FSDPConfig | None = None,
) -> Plan:
    """Plans a sharded model: which dim of each parameter is split, over which axes.

    No memory is allocated: the model is traced abstractly. A unit's weights are
    gathered when it is entered and freed when it is left. If units nest, the innermost
    owns a parameter; parameters of no unit are gathered once, at the entry of the loss.

    Args:
      make_model: Function of a PRNG key that returns an nnx or equinox module, linen
        variables, or any pytree of arrays.
      mesh: Device mesh from `make_mesh`.
      units: Units, whose weights are gathered and freed together. A class (flax.nnx,
        equinox) is entered by any of its methods; a method (`Decoder.embed`) is the
        only one that enters; a path pattern (`"layers.*"`, one `*` a path component)
        is for linen modules and for functions marked with `fsdp.unit`. Stacked layers
        are one of these in `Stacked`. Without units the model is a single one.
      config: Strategy, precision and other options; None for `FSDPConfig()`, ZeRO-3.

    Returns:
      The plan.

    Raises:
      ValueError: If `make_model` is no function of one argument; if the mesh lacks an
        axis of `make_mesh`, or has several devices on `tp` or `cp` that the config does
        not use; if a unit or a pattern matches nothing, or the placements do not fit
        the mesh; all offenders in one message.

    Examples:
      >>> plan = fsdp.fully_shard(make_model, mesh, units=[fsdp.Stacked("layers")])
      >>> jax.tree.map(tuple, plan.specs)
      {'head': ('dp_shard',), 'layers': {'w': (None, 'dp_shard')}}

    Source: Megatron-FSDP `fully_shard_model`.
      FSDP2 splits dim 0 and pads; here the first dim that divides is split, and only
      a parameter without one is padded.
    """
    config = FSDPConfig() if config is None else config
    if not isinstance(config, FSDPConfig):
        raise ValueError(f"fully_shard(config={config!r}): pass an FSDPConfig.")
    check_make_model(make_model)
    check_axes(
        mesh,
        tensor_parallel=bool(config.tensor_parallel),
        context_parallel=bool(config.context_parallel),
    )
    if config.offload:
        check_memory(mesh)
    units = listed(units)
    plain = [u.unit if isinstance(u, Stacked) else u for u in units]
    plain, classes = resolve_methods(plain)
    model = describe(make_model, tuple(classes))
    names = [name for name, _ in named_leaves(model.params)]
    told = [u.num_dims if isinstance(u, Stacked) else None for u in units]
    found = find_units(tuple(zip(plain, told, strict=True)), model.instances, names)
    _check_patterns(config, names)
    check_stacks(model, found)
    if config.lora is not None:
        owners = {name: owner(name, found) for name in names}
        model = with_lora(model, config.lora, owners, ROOT, config.mp_policy)
    placements = placements_of(mesh, config)
    stack = staged_stack(mesh, found, config.pipeline.stack)
    # `model.named_params`, not `names`: with LoRA they are the base and the factors.
    param_plans = tuple(
        _plan_param(
            name, leaf, *owner(name, found), stack, mesh, placements, config, model
        )
        for name, leaf in model.named_params
    )
    # The user's rules speak of the user's parameters, so only these are checked.
    added = model.factors | model.codes
    own = [param for param in param_plans if param.name not in added]
    check_params(config, mesh, own)
    check_experts(config, mesh, own)
    param_plans = streamed(config, mesh, param_plans)
    return Plan(
        mesh, config, make_model, model, param_plans, tuple(units), classes, placements
    )


def choose_split(
    shape: tuple[int, ...],
    num_shards: int,
    *,
    num_stacked: int = 0,
    without: tuple[int | None, ...] = (),
) -> tuple[int | None, int]:
    """Returns the dim of an array to split and the padding that this needs.

    The leftmost dim that the devices divide is chosen: a shard is then a few long
    ranges of a row-major array, which is communicated and written in place without a
    transpose (XLA:GPU kept a transposed copy of all layers' float32 weights that were
    split on their last dim). If they divide none, the dim with the least padding is
    chosen.

    Args:
      shape: Logical shape, e.g. `(layers, embed, mlp)`.
      num_shards: Number of devices that share the array.
      num_stacked: Number of leading dims that are scanned over and so cannot be split.
      without: Dims that other axes split already.

    Returns:
      The dim and its padding in elements; (None, 0) if no dim has at least 2 elements.
    """
    dims = [
        dim
        for dim, size in enumerate(shape)
        if dim >= num_stacked and dim not in without and size > 1
    ]
    if not dims or not math.prod(shape):
        return None, 0
    padding = {dim: -shape[dim] % num_shards for dim in dims}
    even = [dim for dim in dims if not padding[dim]]
    if even:
        return even[0], 0
    # The dim by which the array grows least; on a tie the larger one.
    dim = min(dims, key=lambda dim: (padding[dim] / shape[dim], -shape[dim]))
    return dim, padding[dim]


def _plan_param(
    name: str,
    leaf: Any,
    unit: str,
    num_stacked: int,
    stack: str | None,
    mesh: Mesh,
    placements: Placements,
    config: FSDPConfig,
    model: ModelDef,
) -> ParamPlan:
    param = _unsplit(name, leaf, unit, num_stacked, mesh, config, model)
    if param.is_expert:
        placements = without_ep(placements)
    if stack is not None and (unit == stack or is_within(unit, stack)):
        param = _staged(param, mesh, config)
    elif stack is not None:
        placements = beside_stages(placements, unit)
    num_shards = num_devices(mesh, placements.optimizer)
    if name not in model.factors | model.codes:
        tensor_dim = _tensor_dim(param, mesh, config, num_shards)
        param = _with_split(param, tensor_dim=tensor_dim)
    if name in model.overwrite_with_gradient or not _should_split(param, config):
        return param
    dim, padding = _split_dim(param, mesh, num_shards)
    if dim is None or num_shards == 1:
        return param
    param = _with_split(param, dim=dim, padding=padding)
    param = dataclasses.replace(param, placements=placements)
    return dataclasses.replace(param, gather=_param_gather(param, config))


def _unsplit(
    name: str,
    leaf: Any,
    unit: str,
    num_stacked: int,
    mesh: Mesh,
    config: FSDPConfig,
    model: ModelDef,
) -> ParamPlan:
    """Returns the plan of a parameter before any data axis splits it."""
    kind = _kind(name, config, model)
    return ParamPlan(
        name=name,
        shape=tuple(leaf.shape),
        unit=unit,
        num_stacked=num_stacked,
        kind=kind,
        split=ParamSplit(
            expert_dim=expert_dim(name, leaf.shape, num_stacked, mesh, config)
        ),
        placements=Placements((), (), ()),
        precision=_precision(name, leaf.dtype, config, model, kind),
        unit_policy=UnitPolicy(
            reshard=config.reshard_after_forward and unit != ROOT,
            remat_policy=config.remat_policy,
            prefetch=config.prefetch
            if axes_in_use(mesh, DATA_AXES) or streams(config)
            else 0,
        ),
        is_under_tp=mesh.shape["tp"] > 1,
    )


def _kind(name: str, config: FSDPConfig, model: ModelDef) -> ParamKind:
    if name in model.frozen or any(matches(p, name) for p in config.frozen):
        return ParamKind.FROZEN
    if name in model.overwrite_with_gradient:
        return ParamKind.OVERWRITTEN
    return ParamKind.TRAINED


def _with_split(param: ParamPlan, **dims: Any) -> ParamPlan:
    return dataclasses.replace(param, split=dataclasses.replace(param.split, **dims))


def _precision(
    name: str, dtype: Any, config: FSDPConfig, model: ModelDef, kind: ParamKind
) -> Precision:
    """Returns the dtypes of a parameter: the policy's, but for what they would harm."""
    precision = config.mp_policy.resolve(name, dtype)
    # Codes, scales and fp8 state: a cast would corrupt them.
    if name in model.codes | model.overwrite_with_gradient:
        return Precision(*(4 * [dtype]), accumulate_wide=False)
    if name in model.factors:
        return dataclasses.replace(precision, param=precision.main_params)
    if kind is ParamKind.FROZEN:  # Never updated, so the compute dtype loses nothing.
        return dataclasses.replace(precision, main_params=precision.param)
    return precision


def _staged(param: ParamPlan, mesh: Mesh, config: FSDPConfig) -> ParamPlan:
    """Returns a parameter of the stack that pipeline stages split."""
    virtual_stages = config.pipeline.virtual_stages
    stages = Stages(param.shape[0], mesh.shape["pp"], virtual_stages)
    return _with_split(param, is_staged=True, stage_padding=stages.padding)


def _split_dim(param: ParamPlan, mesh: Mesh, num_shards: int) -> tuple[int | None, int]:
    """Returns the dim that data axes split, and its padding; None for no dim."""
    dim, padding = choose_split(
        param.shape,
        num_shards,
        num_stacked=param.num_stacked,
        without=(param.split.tensor_dim, param.split.expert_dim),
    )
    if dim is not None and not padding:
        return dim, 0
    # The dim that tp splits is preferred to padding.
    tensor_dim = param.split.tensor_dim
    if tensor_dim is not None and _divide_one_dim(param, tensor_dim, mesh, num_shards):
        return tensor_dim, 0
    return dim, padding


def _param_gather(param: ParamPlan, config: FSDPConfig) -> ParamGather | None:
    """Returns the format in which `param` is gathered; None for its own dtype.

    Only large matrices of units are quantized.
    """
    chosen = config.mp_policy.param_gather
    is_matrix = param.unit != ROOT and param.ndim_in_unit > 1
    if not (chosen and param.placements.optimizer and is_matrix):
        return None
    is_large = math.prod(param.shape[param.num_stacked :]) >= chosen.min_elements
    is_real = jnp.issubdtype(param.precision.param, jnp.floating)
    excluded = any(matches(pattern, param.name) for pattern in chosen.exclude)
    return chosen if is_large and is_real and not excluded else None


def _tensor_dim(
    param: ParamPlan, mesh: Mesh, config: FSDPConfig, num_shards: int
) -> int | None:
    """Returns the dim of the parameter that `FSDPConfig.tensor_parallel` names.

    The index includes stacked dims. None too for a parameter with a single dim that tp
    and data axes do not divide together: the data axes split that one.
    """
    if mesh.shape["tp"] == 1 or not param.ndim_in_unit:
        return None
    for pattern, dim in config.tensor_parallel.items():
        if matches(pattern, param.name):
            tensor_dim = param.num_stacked + dim % param.ndim_in_unit
            if param.ndim_in_unit == 1 and not _divide_one_dim(
                param, tensor_dim, mesh, num_shards
            ):
                return None
            return tensor_dim
    return None


def _divide_one_dim(param: ParamPlan, dim: int, mesh: Mesh, num_shards: int) -> bool:
    """Returns whether tp and `num_shards` data devices together divide one dim."""
    return param.shape[dim] % (mesh.shape["tp"] * num_shards) == 0


def _should_split(param: ParamPlan, config: FSDPConfig) -> bool:
    """Returns False for scalars and what the config replicates."""
    return (
        param.ndim_in_unit > 0
        and math.prod(param.shape) >= config.min_shard_elements
        and not any(matches(p, param.name) for p in config.replicated)
    )


def _check_patterns(config: FSDPConfig, names: Sequence[str]) -> None:
    """Refuses patterns that match no parameter: they are misspelled."""
    gather = config.mp_policy.param_gather
    widened = config.mp_policy.param_name_patterns_for_fp32_local_accumulation
    options = {
        "FSDPConfig(replicated=...)": config.replicated,
        "FSDPConfig(frozen=...)": config.frozen,
        "FSDPConfig(tensor_parallel=...)": tuple(config.tensor_parallel),
        "FSDPConfig(expert_parallel=...)": tuple(config.expert_parallel),
        "param_name_patterns_in_fp32": config.mp_policy.param_name_patterns_in_fp32,
        "param_gather.exclude": gather.exclude if gather else (),
        "param_name_patterns_for_fp32_local_accumulation": tuple(
            pattern for pattern in widened if pattern != "all"
        ),
    }
    unused = [
        f"{option}: {pattern!r}"
        for option, patterns in options.items()
        for pattern in unmatched(patterns, names)
    ]
    if unused:
        raise ValueError(
            f"Patterns that match no parameter: {'; '.join(unused)}. Parameter paths "
            f"begin: {', '.join(names[:5])}."
        )
