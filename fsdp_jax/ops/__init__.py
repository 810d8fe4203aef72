"""Operations for models, losses and training steps that run under a plan."""

from fsdp_jax.ops._masked import masked_count as masked_count
from fsdp_jax.ops._masked import masked_max as masked_max
from fsdp_jax.ops._masked import masked_mean as masked_mean
from fsdp_jax.ops._masked import masked_min as masked_min
from fsdp_jax.ops._masked import masked_sum as masked_sum
from fsdp_jax.ops._masked import masked_var as masked_var
from fsdp_jax.ops._masked import masked_whiten as masked_whiten
from fsdp_jax.ops._tensor_parallel import sequence_parallel as sequence_parallel
from fsdp_jax.ops.attention._all_gather import (
    all_gather_attention as all_gather_attention,
)
from fsdp_jax.ops.attention._recurrence import (
    all_gather_recurrence as all_gather_recurrence,
)
from fsdp_jax.ops.attention._ring import ring_attention as ring_attention
from fsdp_jax.ops.attention._shift import shift_tokens as shift_tokens
from fsdp_jax.ops.attention._split_heads import split_heads as split_heads
from fsdp_jax.ops.attention._ulysses import ulysses_attention as ulysses_attention
from fsdp_jax.ops.attention._zigzag import inverse_zigzag as inverse_zigzag
from fsdp_jax.ops.attention._zigzag import zigzag as zigzag
from fsdp_jax.ops.attention._zigzag import zigzag_positions as zigzag_positions
from fsdp_jax.ops.moe._balance import load_balancing_loss as load_balancing_loss
from fsdp_jax.ops.moe._balance import max_expert_load as max_expert_load
from fsdp_jax.ops.moe._dispatch import (
    expert_capacity_dispatch as expert_capacity_dispatch,
)
from fsdp_jax.ops.moe._dispatch import (
    expert_parallel_dispatch as expert_parallel_dispatch,
)
from fsdp_jax.ops.moe._router import update_expert_bias as update_expert_bias
from fsdp_jax.ops.moe._router import update_qb_beta as update_qb_beta
from fsdp_jax.ops.vocab._cross_entropy import (
    vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
)
from fsdp_jax.ops.vocab._cross_entropy import (
    vocab_parallel_log_probs as vocab_parallel_log_probs,
)
from fsdp_jax.ops.vocab._entropy import vocab_parallel_entropy as vocab_parallel_entropy
from fsdp_jax.ops.vocab._fused import (
    fused_linear_cross_entropy as fused_linear_cross_entropy,
)
from fsdp_jax.ops.vocab._padding import pad_vocabulary as pad_vocabulary
from fsdp_jax.ops.vocab._sum_pi_squared import (
    vocab_parallel_sum_pi_squared as vocab_parallel_sum_pi_squared,
)
