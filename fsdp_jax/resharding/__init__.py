"""Live resharding: a state moves from one plan to another, without a disk."""

from fsdp_jax.resharding._moves import LeafMove as LeafMove
from fsdp_jax.resharding._moves import Moves as Moves
from fsdp_jax.resharding._pieces import Piece as Piece
from fsdp_jax.resharding._reshard import plan_moves as plan_moves
from fsdp_jax.resharding._reshard import reshard as reshard
