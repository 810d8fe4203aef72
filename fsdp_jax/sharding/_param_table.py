"""Table of a plan: how each parameter is stored, gathered and split."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh

from fsdp_jax._report import Grid
from fsdp_jax.sharding._param_plan import ParamPlan

_COLUMNS = {
    "parameter": "left",
    "shape": "right",
    "stored as": "left",
    "gathered as": "left",
    "unit": "left",
    "split": "left",
    "bytes/device": "right",
}


def param_table(mesh: Mesh, params: Sequence[ParamPlan]) -> Grid:
    """Table for `Plan.__repr__`: a row for each parameter.

    Args:
      mesh: Device mesh of the plan.
      params: Plans of all parameters.
    """
    return Grid(
        _COLUMNS,
        [_cells(mesh, param) for param in params],
        [param.stored_bytes(mesh) for param in params],
    )


def _cells(mesh: Mesh, param: ParamPlan) -> tuple[str, ...]:
    stored = param.precision.main_params
    return (
        param.name,
        str(param.shape),
        stored.name,
        param.gather.name if param.gather else param.precision.param.name,
        param.unit + (" (stacked)" if param.num_stacked else ""),
        _split(param),
        f"{param.stored_bytes(mesh):,}",
    )


def _split(param: ParamPlan) -> str:
    """Describes how one parameter is split."""
    parts = []
    axes = param.placements.optimizer
    if param.is_staged:
        parts.append("dim 0 over pp")
    if param.split.stage_padding:
        size = param.shape[0]
        parts.append(f"padded {size} to {size + param.split.stage_padding}")
    is_one_dim = bool(axes) and param.split.dim == param.split.tensor_dim
    if is_one_dim:
        parts.append(f"dim {param.split.dim} over {' x '.join(('tp', *axes))}")
    elif axes:
        parts.append(f"dim {param.split.dim} over {' x '.join(axes)}")
    if param.split.padding:
        assert param.split.dim is not None
        size = param.shape[param.split.dim]
        parts.append(f"padded {size} to {size + param.split.padding}")
    if param.split.tensor_dim is not None and not is_one_dim:
        parts.append(f"dim {param.split.tensor_dim} over tp")
    if param.split.expert_dim is not None:
        parts.append(f"dim {param.split.expert_dim} over ep")
    if param.is_frozen:
        parts.append("frozen")
    return ", ".join(parts) or "replicated"
