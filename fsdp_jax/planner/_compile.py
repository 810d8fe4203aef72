"""Compiles steps for absent GPUs, with XLA's scheduler guided by the cost model."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jaxlib.version import __version__ as _INSTALLED

from fsdp_jax.hlo._collectives import collective_of
from fsdp_jax.hlo._parse import Module, parse
from fsdp_jax.hlo._walk import walk
from fsdp_jax.planner._gpu import GPU, CostModel
from fsdp_jax.planner._interconnect import communication_seconds
from fsdp_jax.planner._kernel import kernel_of, kernel_seconds
from fsdp_jax.planner._schedule import CompiledSchedule, schedule_of
from fsdp_jax.planner._timeline import Timeline, replay
from fsdp_jax.training._compiler_options import release

Options = Mapping[str, Any]


def gpu_devices(gpu: GPU, count: int) -> Sequence[Any]:
    """Returns `count` abstract GPUs, to compile for; they cannot hold arrays.

    Pass them to `make_mesh(devices=...)`.

    Args:
      gpu: GPU from `GPUS`.
      count: Number of GPUs; above one node, a multiple of its size.

    Raises:
      ValueError: If the count is not positive or makes no whole nodes, or XLA for GPUs
        is not installed.
    """
    in_node = gpu.cost.devices_per_node
    if count < 1:
        raise ValueError(f"The number of GPUs must be at least 1, got {count}.")
    if count > in_node and count % in_node:
        raise ValueError(
            f"{count} GPUs are neither a part of a node of {in_node} nor whole nodes. "
            f"Use a multiple of {in_node}, or say how many GPUs a node has: "
            f"find_gpu('{gpu.name}', devices_per_node=...), or --gpus-per-node."
        )
    nodes = max(count // in_node, 1)
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=gpu.target_config,
            topology=f"{nodes}x1x{count // nodes}",
        )
    except Exception as error:  # Without the plugin, jax's error type varies.
        raise ValueError(_why_not(error)) from error
    return topology.devices


def _why_not(error: Exception) -> str:
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(importlib.util.find_spec(plugin) for plugin in plugins):
        return (
            "Compiling for GPUs needs XLA's CUDA plugin, of the very version of jax: "
            f"pip install 'fsdp-jax[plan]'. What jax said: {error}"
        )
    return (
        "jax did not set up its CUDA plugin, which compiles for GPUs. Where there is "
        "no driver for one, say so before jax is first used, by JAX_PLATFORMS=cpu or "
        "`jax.config.update('jax_platforms', 'cpu')`: nothing is asked of a GPU. Else "
        "the plugin may be of another version than jax: pip install 'fsdp-jax[plan]'. "
        f"What jax said: {error}"
    )


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """A compiled program with the replay of its schedule.

    Attributes:
      compiled: Compiled program.
      schedule: Schedule of the compiled program.
      timeline: Replay of the schedule.
      guided: Whether XLA's scheduler was given the cost model.
    """

    compiled: jax.stages.Compiled
    schedule: CompiledSchedule
    timeline: Timeline
    guided: bool


EXPOSED_ENOUGH = 0.02
"""Exposed fraction of a step above which a guided compilation is tried."""


def compile_scheduled(
    lowered: jax.stages.Lowered,
    cost: CostModel,
    num_devices: int,
    options: Options,
    *,
    guide: bool = True,
) -> Scheduled:
    """Compiles, and compiles again with a guided scheduler if much is exposed.

    The second compilation gives XLA's scheduler the time of each operation. Its own
    estimates take collectives for much faster than a network between nodes is, so it
    starts them too late to be hidden. The faster of the two programs is kept.

    Args:
      lowered: Step lowered for the abstract GPUs of `gpu_devices`.
      cost: Cost model.
      num_devices: Number of devices of the mesh.
      options: XLA compiler options, see `compiler_options`.
      guide: Whether to compile a second time.
    """
    compiled = _compiled(lowered, options)
    module = parse(text_of(compiled))
    own = _scheduled(compiled, module, cost, num_devices, guided=False)
    waits = own.timeline.exposed_seconds > EXPOSED_ENOUGH * own.timeline.seconds
    if not (guide and waits):
        return own
    profile = scheduling_profile(module, cost, num_devices)
    compiled = _compile_guided(lowered, profile, options)
    module = parse(text_of(compiled))
    guided = _scheduled(compiled, module, cost, num_devices, guided=True)
    return min(own, guided, key=lambda one: one.timeline.seconds)


def _scheduled(
    compiled: jax.stages.Compiled,
    module: Module,
    cost: CostModel,
    num_devices: int,
    *,
    guided: bool,
) -> Scheduled:
    schedule = schedule_of(module)
    timeline = replay(schedule, cost, num_devices)
    return Scheduled(compiled, schedule, timeline, guided)


def text_of(compiled: jax.stages.Compiled) -> str:
    """Returns the HLO text of the compiled module."""
    text = compiled.as_text()
    assert text, "XLA's compilers for CPUs and GPUs tell their modules"
    return text


def _compile_guided(
    lowered: jax.stages.Lowered, profile: str, options: Options
) -> jax.stages.Compiled:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.pbtxt"
        path.write_text(profile)
        guided = {
            "xla_gpu_pgle_profile_file_or_directory_path": str(path),
            # Fusions that differ in the second compilation have no profile entry.
            "xla_gpu_pgle_accuracy_checker": "PGLE_STRICTNESS_LEVEL_OFF",
        }
        return _compiled(lowered, {**options, **guided})


def _compiled(lowered: jax.stages.Lowered, options: Options) -> jax.stages.Compiled:
    """Compiles with XLA's kernel cache and without jax's persistent cache.

    Most of the time goes into the machine code of kernels, which is never run here, and
    programs that differ in schedule or mesh share most kernels. jax can write a program
    compiled for absent GPUs to its persistent cache, but cannot read it back: it warns
    and compiles again.
    """
    was_enabled = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax reads the setting once and caches it.
    try:
        return lowered.compile(compiler_options={**_kernel_cache(), **options})
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
        compilation_cache.reset_cache()


# XLA caches kernels only if it compiles modules in parallel, as it always does from
# this version on, which has no option for it any more.
_ALWAYS_PARALLEL = (0, 11)


def _kernel_cache() -> Options:
    options: dict[str, Any] = {"xla_gpu_kernel_cache_file": str(_scratch() / "kernels")}
    if release(_INSTALLED) < _ALWAYS_PARALLEL:
        options["xla_gpu_enable_llvm_module_compilation_parallelism"] = True
    return options


@functools.cache
def _scratch() -> Path:
    """Returns this process's temporary folder: XLA writes its cache without a lock."""
    folder = tempfile.mkdtemp(prefix="fsdp_jax-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def scheduling_profile(module: Module, cost: CostModel, num_devices: int) -> str:
    """Returns the seconds of each instruction as an XLA profile.

    Returns:
      Text of a `ProfiledInstructionsProto`.
    """
    return "\n".join(
        f'costs {{ name: "{name}" cost_us: {seconds * 1e6:.3f} }}'
        for name, seconds in _seconds(module, cost, num_devices)
        if seconds
    )


def _seconds(
    module: Module, cost: CostModel, num_devices: int
) -> Iterator[tuple[str, float]]:
    for computation, one, *_ in walk(module):
        if collective := collective_of(module, computation, one):
            yield one.name, communication_seconds(collective, num_devices, cost)
        elif one.opcode != "while" and not one.opcode.endswith("-done"):
            if kernel := kernel_of(module, computation, one):
                yield one.name, kernel_seconds(kernel, cost)
