"""Estimates the memory and time of a training step on GPUs that are not present."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from fsdp_jax._tree import PyTree
from fsdp_jax.planner._comm_table import sent_rows
from fsdp_jax.planner._compile import compile_scheduled, gpu_devices
from fsdp_jax.planner._gpu import GPU, find_gpu
from fsdp_jax.planner._host_memory import mark_host_arguments, offloaded
from fsdp_jax.planner._kernel import workspace_bytes
from fsdp_jax.planner._memory import predict_memory
from fsdp_jax.planner._model_flops import model_flops
from fsdp_jax.planner._schedule import kernels_of
from fsdp_jax.planner._step_estimate import StepEstimate
from fsdp_jax.sharding._ambient_mesh import in_own_mesh
from fsdp_jax.sharding._fully_shard import fully_shard
from fsdp_jax.sharding._mesh import AXES, make_mesh
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.step._loss_arguments import LossFn
from fsdp_jax.training._compiler_options import compiler_options
from fsdp_jax.training._memory_check import compiled_bytes
from fsdp_jax.training._state import abstract_state
from fsdp_jax.training._train_step import make_train_step

# Options of a step that say what its loss function returns.
_FORM = ("has_aux", "calculate_per_token_loss")


@in_own_mesh
def estimate_step(
    plan: Plan,
    loss_fn: LossFn,
    tx: optax.GradientTransformation | Callable[[Plan], optax.GradientTransformation],
    batch: PyTree,
    *,
    gpu: str | GPU = "h200",
    gpus: int | None = None,
    mesh: Mapping[str, int] | None = None,
    tokens: int | None = None,
    options: Mapping[str, Any] | None = None,
    guide: bool = True,
    **step_options: Any,
) -> StepEstimate:
    """Compiles the training step for absent GPUs, and estimates its cost.

    The compiled program is the one that would run. Its schedule is replayed on an
    analytical model of the GPU, with one stream for computation and one for
    communication. If more than 2 % of the step is exposed communication, the step is
    compiled again with the model's times given to XLA's scheduler, and the faster
    program is kept.

    Args:
      plan: Plan from `fully_shard`, on any mesh.
      loss_fn: Loss function, as for `make_train_step`.
      tx: Optimizer; for one that is made for a plan's mesh, as `fsdp.optim.layer_wise`
        is, a function from a plan to it.
      batch: Global batch, of concrete or abstract arrays.
      gpu: Name in `GPUS`, or a GPU, e.g. with another cost model.
      gpus: Number of GPUs; None for the size of the plan's mesh.
      mesh: Sizes of mesh axes, at most one of them -1. None for those of the plan's
        mesh, with `dp_shard` as the remainder.
      tokens: Tokens of the batch, for tokens per second.
      options: XLA compiler options; None for `compiler_options()`, with those for `tp`
        and `cp` if the mesh has them.
      guide: Whether to compile the second time. A schedule that hides more may hold
        more: its memory is up to 10 % above the prediction.
      **step_options: Options of `make_train_step`.

    Returns:
      The estimate; print it for a table.

    Raises:
      ValueError: If the GPU is unknown, the mesh does not fit, `tx` is made for another
        plan, or XLA's compiler for GPUs is not installed.

    Examples:
      >>> estimate = fsdp.estimate_step(plan, loss_fn, tx, batch, guide=False)
      >>> estimate.fits
      True
    """
    gpu = find_gpu(gpu)
    count = plan.mesh.size if gpus is None else gpus
    plan, tx = _on_gpus(plan, tx, gpu, count, mesh)
    # None for jit: they would still apply beneath the `options` of `compile`.
    step = make_train_step(plan, loss_fn, tx, compiler_options={}, **step_options)
    state = abstract_state(plan, tx, step_options.get("loss_scale"))
    _check_mesh(plan, state.opt_state)
    abstract_batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch
    )
    if options is None:
        options = compiler_options(plan=plan)
    lowered = step.lower(state, abstract_batch)
    if plan.config.offload:
        mark_host_arguments(plan, lowered, state)
    scheduled = compile_scheduled(lowered, gpu.cost, count, options, guide=guide)
    traced = step.jitted.trace(state, abstract_batch).jaxpr
    form = {name: step_options.get(name, False) for name in _FORM}
    return StepEstimate(
        gpu=gpu,
        plan=plan,
        compiled=scheduled.compiled,
        schedule=scheduled.schedule,
        timeline=scheduled.timeline,
        guided=scheduled.guided,
        compiled_bytes=compiled_bytes(scheduled.compiled)
        + workspace_bytes(kernels_of(scheduled.schedule)),
        memory=predict_memory(plan, state, abstract_batch, traced),
        offloaded=offloaded(plan, state, step.num_microbatches)
        if plan.config.offload
        else None,
        sent=sent_rows(scheduled.timeline, plan),
        tokens=tokens,
        model_flops=model_flops(plan, loss_fn, abstract_batch, **form) / count,
        num_microbatches=step.num_microbatches,
    )


def _on_gpus(
    plan: Plan,
    tx: optax.GradientTransformation | Callable[[Plan], optax.GradientTransformation],
    gpu: GPU,
    count: int,
    mesh: Mapping[str, int] | None,
) -> tuple[Plan, optax.GradientTransformation]:
    """Returns the plan on a mesh of GPUs that are not here, and its optimizer."""
    sizes = {axis: plan.mesh.shape[axis] for axis in AXES} | {"dp_shard": -1}
    given = sizes if mesh is None else dict(mesh)
    there = make_mesh(**given, devices=gpu_devices(gpu, count))
    plan = fully_shard(plan.make_model, there, plan.unit_specs, plan.config)
    # An optimizer is a tuple of functions, and so not callable itself.
    return plan, tx(plan) if callable(tx) else tx


def _check_mesh(plan: Plan, opt_state: PyTree) -> None:
    """Refuses an optimizer whose state is sharded over another mesh than the plan's."""
    meshes = [leaf.sharding.mesh for leaf in jax.tree.leaves(opt_state)]
    if others := [mesh for mesh in meshes if mesh != plan.mesh]:
        raise ValueError(
            f"estimate_step: {len(others)} of {len(meshes)} arrays of the optimizer's "
            f"state are sharded over {others[0].size} devices of the mesh that it was "
            f"made for, not over the {plan.mesh.size} GPUs of the estimate: pass "
            "a function in its place, such as tx=lambda plan: "
            "fsdp.optim.layer_wise(plan, ...)."
        )
