"""Rules of expert parallelism: the dim of each parameter that is split over `ep`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.sharding import Mesh

from fsdp_jax._tree import matches
from fsdp_jax.sharding._config import FSDPConfig, Placements
from fsdp_jax.sharding._plan import ParamPlan


def expert_dim(
    name: str,
    shape: Sequence[int],
    num_stacked: int,
    mesh: Mesh,
    config: FSDPConfig,
) -> int | None:
    """Returns the dim of the parameter that `FSDPConfig.expert_parallel` names.

    The index includes stacked dims. None if `ep` has one device, the parameter is a
    scalar in its unit, or no pattern matches.
    """
    ndim = len(shape) - num_stacked
    if mesh.shape["ep"] == 1 or ndim < 1:
        return None
    for pattern, dim in config.expert_parallel.items():
        if matches(pattern, name):
            return num_stacked + dim % ndim
    return None


def without_ep(placements: Placements) -> Placements:
    """Returns the axes that split an expert further: all but `ep`."""
    stations = dataclasses.asdict(placements).items()
    return Placements(
        **{name: tuple(a for a in axes if a != "ep") for name, axes in stations}
    )


def check_experts(config: FSDPConfig, mesh: Mesh, params: Sequence[ParamPlan]) -> None:
    """Raises one `ValueError` that lists all infeasible rules of `expert_parallel`."""
    ep = mesh.shape["ep"]
    wrong = []
    for pattern, dim in config.expert_parallel.items():
        for param in params:
            if matches(pattern, param.name):
                wrong += _misfits(config, param, pattern, dim, ep)
    if wrong:
        raise ValueError(
            "FSDPConfig(expert_parallel=...) does not fit the model: "
            f"{'; '.join(wrong)}. Name the dim that counts experts, which ep must "
            "divide, or use fewer devices on ep."
        )


def _misfits(
    config: FSDPConfig, param: ParamPlan, pattern: str, dim: int, ep: int
) -> list[str]:
    ndim = param.ndim_in_unit
    if not -ndim <= dim < ndim:
        return [
            f"{pattern!r}: dim {dim} of '{param.name}', which has {ndim} in its unit"
        ]
    wrong = []
    at = param.num_stacked + dim % ndim
    if param.shape[at] % ep:
        wrong.append(
            f"ep={ep} does not divide '{param.name}' {param.shape}: dim {at}, of "
            f"{param.shape[at]} experts"
        )
    if (
        param.split.expert_dim is not None
        and param.split.expert_dim == param.split.tensor_dim
    ):
        wrong.append(f"'{param.name}' {param.shape}: dim {at} is split over tp already")
    if any(matches(pattern, param.name) for pattern in config.replicated):
        wrong.append(f"'{param.name}' is to be replicated (replicated=...)")
    return wrong
