"""Optimizer transformations: 8-bit state, layer-wise updates (Muon), averages."""

from fsdp_jax.optim._ema import ema_of_params as ema_of_params
from fsdp_jax.optim._layer_wise import layer_wise as layer_wise
from fsdp_jax.optim._quantized_state import EightBitState as EightBitState
from fsdp_jax.optim._quantized_state import eight_bit as eight_bit
