"""Plan of a training run, checked against its batches and its routing."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

import fsdp_jax as fsdp
from bridge.models._positions import check_length
from fsdp_jax.cli._context_parallel import (
    DOCUMENT_SEQUENCES,
    SEQUENCES,
    abstract_pairs,
    abstract_reward_pairs,
    abstract_rows,
    check_rows,
)
from fsdp_jax.cli._data_config import DataConfig
from fsdp_jax.cli._decoder import computed_in, plan_decoder
from fsdp_jax.cli._elastic import num_microbatches
from fsdp_jax.cli._model_source import Origin
from fsdp_jax.cli._precision import OffloadTo
from fsdp_jax.cli._sharding_options import Strategy, check_batch_parts
from fsdp_jax.cli._train_config import TrainConfig
from fsdp_jax.data._batch import check_batch


def plan_run(
    config: TrainConfig,
    origin: Origin,
    mesh: Mesh,
    *,
    strategy: Strategy,
    offload: OffloadTo | None,
    documents: bool,
) -> fsdp.Plan:
    """Plans the model of a run, and checks that batches and routing fit the plan.

    Args:
      config: Options of the numbers.
      origin: Model.
      mesh: Device mesh.
      strategy: Sharding and memory of a step.
      offload: State kept in host memory; None for none.
      documents: Whether rows are of documents.

    Raises:
      ValueError: If the mesh does not divide rows, batch or experts, or rows are longer
        than a table of learned positions.
    """
    seq = config.data.seq
    check_length(origin.config, seq, f"--seq {seq}")
    check_rows(seq, mesh.shape["tp"], mesh.shape["cp"])
    config.routing.check(origin.config)
    precision, padded = config.precision, config.routing.pads(mesh)
    plan = plan_decoder(
        origin.config,
        mesh,
        strategy.applied(_sharding(config, origin, offload), mesh, padded=padded),
        config.routing,
        prefetch=strategy.num_ahead,
        unroll=strategy.unroll,
        cp_form=strategy.cp_algorithm,
        attention=strategy.attention,
        products=precision.products,
        expert_products=precision.expert_products,
        num_layers_at_start_in_bf16=precision.num_layers_at_start_in_bf16,
        num_layers_at_end_in_bf16=precision.num_layers_at_end_in_bf16,
        batch_parts=strategy.batch_parts,
        sequences=DOCUMENT_SEQUENCES if documents else SEQUENCES,
        scored=config.data.objective == "reward",
    )
    microbatches = num_microbatches(config, mesh, fsdp.launch.generation())
    rows = _abstract_batch(config.data, mesh.shape["cp"], documents=documents)
    check_batch(plan, rows, microbatches)
    check_batch_parts(strategy.batch_parts, config.data.batch, microbatches, mesh)
    return plan


def _sharding(
    config: TrainConfig, origin: Origin, offload: OffloadTo | None
) -> fsdp.FSDPConfig:
    param_dtype = config.precision.param_dtype
    if config.adapter is None:
        sharding = computed_in(param_dtype)
    else:
        sharding = config.adapter.sharding(origin.config, param_dtype)
    return config.precision.sharding(sharding, offload)


def _abstract_batch(data: DataConfig, cp: int, *, documents: bool) -> Any:
    if data.objective == "dpo":
        return abstract_pairs(data.batch, data.seq)
    if data.objective == "reward":
        return abstract_reward_pairs(data.batch, data.seq)
    return abstract_rows(data.batch, data.seq, cp, documents=documents)
