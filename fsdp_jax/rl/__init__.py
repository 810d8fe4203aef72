"""Batches exchanged between processes: arrays, host objects and metadata."""

from fsdp_jax.rl._batch import Batch as Batch
from fsdp_jax.rl._disk import load_batch as load_batch
from fsdp_jax.rl._disk import save_batch as save_batch
from fsdp_jax.rl._gather import all_gather as all_gather
from fsdp_jax.rl._gather import (
    allgather_dict_into_dict as allgather_dict_into_dict,
)
from fsdp_jax.rl._jagged import Jagged as Jagged
