"""Training after pretraining: batches between processes, and losses."""

from fsdp_jax.rl._batch import Batch as Batch
from fsdp_jax.rl._disk import load_batch as load_batch
from fsdp_jax.rl._disk import save_batch as save_batch
from fsdp_jax.rl._gather import all_gather as all_gather
from fsdp_jax.rl._gather import (
    allgather_dict_into_dict as allgather_dict_into_dict,
)
from fsdp_jax.rl._jagged import Jagged as Jagged
from fsdp_jax.rl._losses import PreferenceLoss as PreferenceLoss
from fsdp_jax.rl._losses import dpo_loss as dpo_loss
from fsdp_jax.rl._losses import group_advantages as group_advantages
from fsdp_jax.rl._losses import policy_loss as policy_loss
from fsdp_jax.rl._losses import reward_loss as reward_loss
from fsdp_jax.rl._losses import sequence_log_probs as sequence_log_probs
