"""Functions that a model or its training step needs under a plan."""

from fsdp_jax.ops._router import update_expert_bias as update_expert_bias
from fsdp_jax.ops._router import update_qb_beta as update_qb_beta
