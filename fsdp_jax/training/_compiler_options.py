"""XLA compiler options of a training step, per jaxlib version.

They are passed as compile options, never through `XLA_FLAGS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from jax.sharding import Mesh
from jaxlib.version import __version__ as _INSTALLED

from fsdp_jax.sharding._memory_summary import UnitBytes, unit_bytes
from fsdp_jax.sharding._plan import Plan

Options = dict[str, bool | int | str]
Pipelining = Literal["all", "marked"]

_OVERLAP: Options = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_triton_gemm": False,
}
# XLA combines collectives up to these bytes. More than a unit has would let it combine
# those of several units, which then wait for each other and are in memory together.
_MOST_GATHERED, _MOST_REDUCED = 1 << 30, 1 << 27
# The first ends what waits for devices of its own process to launch a collective. It
# does not fire for another process that is alive but stuck (jax issue 38503), which
# XLA's watchdog of executions does: no step may take longer than its time, the same as
# `Timeouts.stall_secs`.
_TIME_OUT: Options = {
    "xla_gpu_nccl_termination_timeout_seconds": 600,
    "xla_gpu_execution_terminate_timeout": "1800s",
}

# XLA of 0.11 writes a product that is saved for backward into its stack, and computes
# it a second time for those who read it at once.
_ONE_PRODUCT: Options = {"xla_gpu_enable_dynamic_slice_fusion": False}

# Keyed by jaxlib (major, minor), ascending. XLA renames and drops options without
# notice, so each version is checked.
_BY_VERSION: dict[tuple[int, ...], Options] = {
    (0, 10): _OVERLAP | _TIME_OUT,
    (0, 11): _OVERLAP | _TIME_OUT | _ONE_PRODUCT,
    (0, 12): _OVERLAP | _TIME_OUT,
}


# By default XLA runs one collective at a time: an all-gather of weights between nodes
# would have to complete before activations may be communicated over tp within a node.
_TENSOR_PARALLEL: Options = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
}
# The same with tokens that are sent to experts over ep.
_EXPERT_PARALLEL = _TENSOR_PARALLEL
# In the backward pass of ring attention, keys and values are sent to the next rank,
# gradients arrive from the previous one, and weights are prefetched for the next layer.
_CONTEXT_PARALLEL: Options = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}
# Parts of a batch that run side by side read the same weights and constants, and XLA
# merges products and small fusions that read the same. What is sent to experts of one
# part would then wait for the attention of all.
_PARTS_APART: Options = {
    "xla_gpu_dot_merger_threshold_mb": 0,
    "xla_disable_hlo_passes": "multi_output_fusion",
}


_MODE = "COLLECTIVE_PIPELINING_MODE_"
# Of 0.11 none was tried; a later patch of it may have the newer names.
_PIPELINED: dict[tuple[int, ...], dict[Pipelining, Options]] = {
    (0, 10): {
        "all": {
            "xla_gpu_enable_pipelined_all_gather": True,
            "xla_gpu_enable_pipelined_reduce_scatter": True,
        },
    },
    (0, 12): {
        "all": {
            "xla_gpu_pipeline_all_gather": f"{_MODE}ON",
            "xla_gpu_pipeline_reduce_scatter": f"{_MODE}ON",
        },
        "marked": {
            "xla_gpu_pipeline_all_gather": f"{_MODE}EXPLICIT",
            "xla_gpu_pipeline_reduce_scatter": f"{_MODE}EXPLICIT",
        },
    },
}
_SYMMETRIC: Options = {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True}


def compiler_options(
    jaxlib_version: str | None = None,
    *,
    tensor_parallel: bool = False,
    context_parallel: bool = False,
    expert_parallel: bool = False,
    plan: Plan | None = None,
    batch_parts: int = 1,
    pipelining: Pipelining | None = None,
    symmetric_buffers: bool = False,
) -> Options:
    """Returns XLA:GPU options for overlapped communication and collective timeouts.

    `make_train_step` uses them by default on GPUs, with lower combine thresholds, those
    of its plan's units; elsewhere pass them to `jax.jit` or to
    `jitted.lower(...).compile` as `compiler_options`. An option that the installed XLA
    does not know raises there; the same name in `XLA_FLAGS` aborts the process.

    An execution that takes over 1800 s is ended by XLA's watchdog: give steps that take
    longer more, `{**options, "xla_gpu_execution_terminate_timeout": "7200s"}`.

    Args:
      jaxlib_version: Version of jaxlib, such as "0.12.0"; default the installed one.
      tensor_parallel: Whether the mesh has more than one device on `tp`, so that
        activations are communicated between the gathers of weights.
      context_parallel: Whether the mesh has more than one device on `cp`, so that keys
        and values are communicated as well.
      expert_parallel: Whether the mesh has more than one device on `ep`, so that tokens
        are sent to experts between the gathers of weights.
      plan: Plan of the step, whose mesh says what is parallel, and whose units the
        combine thresholds, as `make_train_step` has them; None for fixed thresholds.
      batch_parts: Parts of a rank's rows that layers run side by side, as of
        `bridge.models.Decoder`. Of more than one, XLA merges no computation of several,
        which would make one part wait for another.
      pipelining: XLA's own pipelining of collectives over the iterations of a loop,
        which takes the place of units ahead (`FSDPConfig(prefetch=0)`): of "all", or of
        those that are "marked", as the gathers and reductions of units are. It changes
        the program, see `fsdp-jax plan --search`; on GPUs it has not been measured.
      symmetric_buffers: Whether what collectives read and write is in NCCL's symmetric
        memory, which needs NCCL 2.28. Not measured on GPUs either.

    Returns:
      A new dict that the caller may modify, with the option names of this version. A
      version newer than all known ones gets the options of the newest.

    Raises:
      ValueError: If `jaxlib_version` is not a version, or older than 0.10, or if its
        XLA has no such `pipelining`.
    """
    version = _INSTALLED if jaxlib_version is None else jaxlib_version
    base = _BY_VERSION[_known(version)]
    unit = None
    if plan is not None:
        unit, sizes = unit_bytes(plan.mesh, plan.param_plans), plan.mesh.shape
        tensor_parallel |= sizes["tp"] > 1
        context_parallel |= sizes["cp"] > 1
        expert_parallel |= sizes["ep"] > 1
    more = _EXPERT_PARALLEL if expert_parallel else {}
    if tensor_parallel:
        more = _TENSOR_PARALLEL
    if context_parallel:
        more = _CONTEXT_PARALLEL
    asked = unmeasured_options(version, pipelining, symmetric_buffers)
    return {
        **base,
        **_thresholds(unit),
        **more,
        **batch_parts_options(batch_parts),
        **asked,
    }


def batch_parts_options(batch_parts: int) -> Options:
    """Returns the options that keep parts of a batch apart; none of a single one."""
    return dict(_PARTS_APART) if batch_parts > 1 else {}


def unmeasured_options(
    version: str, pipelining: Pipelining | None, symmetric_buffers: bool
) -> Options:
    """Returns the options whose effect on GPUs has not been measured.

    Args:
      version: Version of jaxlib.
      pipelining: As of `compiler_options`.
      symmetric_buffers: As of `compiler_options`.

    Raises:
      ValueError: If this XLA has no such `pipelining`.
    """
    options = dict(_SYMMETRIC) if symmetric_buffers else {}
    if pipelining is None:
        return options
    modes = pipelining_modes(version)
    if pipelining not in modes:
        names = " or ".join(f"'{mode}'" for mode in modes)
        raise ValueError(
            f"pipelining='{pipelining}': XLA of jaxlib {version} has {names}. Pass one "
            "of these, or take a jaxlib from 0.12 on, which has 'all' and 'marked'."
        )
    return options | modes[pipelining]


def pipelining_modes(version: str = _INSTALLED) -> dict[Pipelining, Options]:
    """Returns the options of each way in which XLA pipelines collectives itself."""
    known = [number for number in _PIPELINED if number <= _known(version)]
    return _PIPELINED[known[-1]]


def _known(version: str) -> tuple[int, ...]:
    """Returns the newest version with known options that is not after this one."""
    wanted = release(version)[:2]
    known = [number for number in _BY_VERSION if number <= wanted]
    if not known:
        raise ValueError(f"jaxlib {version} is older than 0.10, the oldest known here.")
    return known[-1]


def options_of(mesh: Mesh) -> Options:
    """Returns the compiler options for the axes of a mesh, whatever the units."""
    return compiler_options(
        tensor_parallel=mesh.shape["tp"] > 1,
        context_parallel=mesh.shape["cp"] > 1,
        expert_parallel=mesh.shape["ep"] > 1,
    )


def options_for(
    plan: Plan,
    given: Mapping[str, bool | int | str] | None,
    batch_parts: int = 1,
) -> Options:
    """Returns `given`; by default the options of a plan on GPUs, and none elsewhere."""
    if given is not None:
        return dict(given)
    if not _is_of_gpus(plan.mesh):
        return {}
    return compiler_options(plan=plan, batch_parts=batch_parts)


def _thresholds(unit: UnitBytes | None) -> Options:
    """Returns the bytes up to which XLA combines collectives of a kind."""
    gathered, scattered, reduced = _MOST_GATHERED, _MOST_REDUCED, _MOST_REDUCED
    if unit and unit.weights:
        gathered = min(gathered, unit.weights)
        reduced = min(reduced, unit.gradients)
        scattered = min(scattered, unit.scattered)  # XLA counts what comes out.
    return {
        "xla_gpu_all_gather_combine_threshold_bytes": gathered,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": scattered,
        "xla_gpu_all_reduce_combine_threshold_bytes": reduced,
    }


def release(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version, for comparison.

    Raises:
      ValueError: If `version` does not begin with at least two numbers.
    """
    found = re.match(r"\d+(\.\d+)+", version)
    if not found:
        raise ValueError(f"'{version}' is no version. Write it as '0.12.0'.")
    return tuple(int(number) for number in found[0].split("."))


def _is_of_gpus(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform in ("gpu", "cuda")
