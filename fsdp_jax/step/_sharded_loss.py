"""A loss of shards with its plan, and what each rank passes to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jaxtyping import Array

from fsdp_jax._tree import PyTree
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.step._aux_outputs import AuxFormat
from fsdp_jax.step._loss import LossForm, LossOfShards, loss_of_shards
from fsdp_jax.step._loss_arguments import LossFn
from fsdp_jax.step._shard import Shard


class ShardedLoss(NamedTuple):
    """The loss of a plan's shards.

    Attributes:
      plan: Plan of the model.
      call: Loss as a function of shards.
      aux_format: Sorter of its auxiliary outputs.
    """

    plan: Plan
    call: LossOfShards
    aux_format: AuxFormat


class RankInputs(NamedTuple):
    """Inputs of one rank to a loss, within `shard_map`.

    Attributes:
      shards: Shards of all parameters, in plan order.
      model_state: Arrays of the model that are not parameters.
      rows: Batch of this rank.
      key: PRNG key of this rank.
    """

    shards: Sequence[Shard]
    model_state: PyTree
    rows: PyTree
    key: Array


class MicrobatchInputs(NamedTuple):
    """Inputs of one rank to a loss, by microbatch, within `shard_map`.

    Attributes:
      shards: Shards of all parameters, in plan order.
      model_state: Arrays of the model that are not parameters.
      microbatches: Batch of this rank, each leaf `[microbatches, rows, ...]`.
      key: PRNG key of this rank.
    """

    shards: Sequence[Shard]
    model_state: PyTree
    microbatches: PyTree
    key: Array

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches."""
        return jax.tree.leaves(self.microbatches)[0].shape[0]

    @property
    def example(self) -> tuple[PyTree, PyTree, Array]:
        """Arguments of a loss after the shards, with the first microbatch's rows."""
        rows = jax.tree.map(lambda x: x[0], self.microbatches)
        return self.model_state, rows, self.key


def sharded_loss(plan: Plan, loss_fn: LossFn, form: LossForm) -> ShardedLoss:
    """Returns the loss of a plan's shards, with what sorts its auxiliary outputs.

    Args:
      plan: Plan of the model.
      loss_fn: The user's loss.
      form: Form of its result.
    """
    aux_format = AuxFormat(has_whole_rows=plan.mesh.shape["cp"] == 1)
    return ShardedLoss(plan, loss_of_shards(plan, loss_fn, form), aux_format)
