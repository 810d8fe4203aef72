"""Modules that run inside `shard_map`: units, their collectives, and the loss."""

from fsdp_jax.step._gathered import Float8Weight as Float8Weight
from fsdp_jax.step._gathered import gathered_float8 as gathered_float8
from fsdp_jax.step._model_state import Tally as Tally
from fsdp_jax.step._model_state import UpdatedModel as UpdatedModel
from fsdp_jax.step._rank_dependence import assume_replicated as assume_replicated
from fsdp_jax.step._scan import scan as scan
from fsdp_jax.step._unit import unit as unit
