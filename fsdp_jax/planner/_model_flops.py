"""Counts the FLOPs that a model needs for a step, on any machine."""

from __future__ import annotations

import jax
import optax

from fsdp_jax._tree import PyTree
from fsdp_jax.planner._flops import Provenance, training_flops
from fsdp_jax.planner.liveness._trace import on_one_device
from fsdp_jax.sharding._ambient_mesh import in_own_mesh
from fsdp_jax.sharding._fully_shard import fully_shard
from fsdp_jax.sharding._mesh import make_mesh
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.step._loss import LossForm
from fsdp_jax.step._loss_arguments import LossFn
from fsdp_jax.training._gradients import global_loss
from fsdp_jax.training._state import abstract_state


@in_own_mesh
def model_flops(
    plan: Plan,
    loss_fn: LossFn,
    batch: PyTree,
    *,
    has_aux: bool = False,
    calculate_per_token_loss: bool = False,
) -> float:
    """Counts the FLOPs of a global batch: forward and backward.

    They are those of matrix products, without recomputation, for model FLOPs
    utilization: divide by the seconds of a step and by the peak of all devices.
    Attention counts as full, causal or not. Backward is twice forward, less the
    gradients of frozen parameters, and of what they alone make of the batch.

    Args:
      plan: Plan from `fully_shard`.
      loss_fn: Loss function, as for `make_train_step`.
      batch: Global batch, of concrete or abstract arrays.
      has_aux: Whether `loss_fn` returns `(loss, aux)`.
      calculate_per_token_loss: Whether `loss_fn` returns `(sum, count)`.

    Returns:
      FLOPs of all devices together.

    Examples:
      >>> fsdp.planner.model_flops(plan, loss_fn, batch) > 0
      True
    """
    # Traced for one device, so that no axis is partitioned by XLA and all shapes are
    # known.
    alone = make_mesh(devices=list(plan.mesh.devices.flat[:1]))
    plan = fully_shard(plan.make_model, alone, plan.unit_specs, plan.config)
    state = abstract_state(plan, optax.identity())
    key = jax.eval_shape(lambda: jax.random.key(0))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    form = LossForm(has_aux, calculate_per_token_loss)
    given = (state.params, abstract, key, state.model_state)
    traced = jax.make_jaxpr(global_loss(plan, loss_fn, form))(*given)
    program = on_one_device(traced.jaxpr)
    assert program is not None  # The mesh has one device.
    params = zip(
        plan.param_plans, plan.treedef.flatten_up_to(state.params), strict=True
    )
    origins = [
        Provenance.FROZEN if param.is_frozen else Provenance.TRAINED
        for param, arrays in params
        for _ in jax.tree.leaves(arrays)
    ]
    constants = len(program.inputs) - len(jax.tree.leaves(given))
    rest = len(program.inputs) - constants - len(origins)
    data = Provenance.DATA
    return training_flops(program, [data] * constants + origins + [data] * rest)
