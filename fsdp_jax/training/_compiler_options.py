"""What XLA is told to compile a step with: per version, and never by environment."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jax.sharding import Mesh
from jaxlib.version import __version__ as _INSTALLED

Options = dict[str, bool | int | str]

_OVERLAP: Options = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_all_gather_combine_threshold_bytes": 1 << 30,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1 << 27,
    "xla_gpu_all_reduce_combine_threshold_bytes": 1 << 27,
}
# A collective that other processes never enter ends with an error, as in torch after
# ten minutes; by itself XLA waits for ever.
_TIME_OUT: Options = {"xla_gpu_nccl_termination_timeout_seconds": 600}

# By the first two numbers of jaxlib, in order. XLA renames and drops options without
# notice, so each version is looked at, though these three know the same.
_BY_VERSION: dict[tuple[int, ...], Options] = {
    (0, 10): _OVERLAP | _TIME_OUT,
    (0, 11): _OVERLAP | _TIME_OUT,
    (0, 12): _OVERLAP | _TIME_OUT,
}


# XLA by itself has one collective under way at a time: weights on their way between
# nodes would have to arrive before tokens may cross tp within one.
_TENSOR_PARALLEL: Options = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
}
# In a ring's backward keys and values are on their way to the next rank, the gradients
# of others come from the one before, and weights are gathered for the next layer.
_CONTEXT_PARALLEL: Options = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}


def compiler_options(
    jaxlib_version: str | None = None,
    *,
    tensor_parallel: bool = False,
    context_parallel: bool = False,
) -> Options:
    """Options of XLA:GPU under which communication is hidden, and does not hang.

    `make_train_step` takes them by itself on GPUs; elsewhere pass them to `jax.jit` or
    to `jitted.lower(...).compile`, as `compiler_options`. An option that the XLA at
    hand does not know raises there; the same name in `XLA_FLAGS` aborts the process.

    Args:
      jaxlib_version: For which jaxlib, such as "0.12.0"; default the one installed.
      tensor_parallel: For a mesh with more than one device on `tp`, where activations
        travel between the weights.
      context_parallel: For a mesh with more than one device on `cp`, where keys and
        values do.

    Returns:
      A dict of one's own, to change at will: names that this version knows, for one
      newer than all that are known here those of the newest.

    Raises:
      ValueError: If it is no version, or one older than jaxlib 0.10.
    """
    version = _INSTALLED if jaxlib_version is None else jaxlib_version
    wanted = release(version)[:2]
    known = [number for number in _BY_VERSION if number <= wanted]
    if not known:
        raise ValueError(f"jaxlib {version} is older than 0.10, the oldest known here.")
    more = _TENSOR_PARALLEL if tensor_parallel else {}
    if context_parallel:
        more = _CONTEXT_PARALLEL
    return {**_BY_VERSION[known[-1]], **more}


def options_of(mesh: Mesh) -> Options:
    """Those for the axes of a mesh."""
    return compiler_options(
        tensor_parallel=mesh.shape["tp"] > 1, context_parallel=mesh.shape["cp"] > 1
    )


def options_for(mesh: Mesh, given: Mapping[str, bool | int | str] | None) -> Options:
    """The options given; without any, those of GPUs where the mesh is of GPUs."""
    if given is not None:
        return dict(given)
    if not _is_of_gpus(mesh):
        return {}
    return options_of(mesh)


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with, to compare it by.

    Raises:
      ValueError: If it does not begin with two numbers.
    """
    found = re.match(r"\d+(\.\d+)+", version)
    if not found:
        raise ValueError(f"'{version}' is no version. Write it as '0.12.0'.")
    return tuple(int(number) for number in found[0].split("."))


def _is_of_gpus(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform in ("gpu", "cuda")
