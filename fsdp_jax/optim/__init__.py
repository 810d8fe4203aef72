"""Optimizer transformations: narrow state, layer-wise updates (Muon), averages."""

from fsdp_jax.optim._eight_bit import eight_bit as eight_bit
from fsdp_jax.optim._ema import ema_of_params as ema_of_params
from fsdp_jax.optim._fused_matrix import FusedMatrix as FusedMatrix
from fsdp_jax.optim._layer_wise import layer_wise as layer_wise
from fsdp_jax.optim._layer_wise import layer_wise_work as layer_wise_work
from fsdp_jax.optim._matrix_work import LayerWiseWork as LayerWiseWork
from fsdp_jax.optim._precision_aware import precision_aware as precision_aware
from fsdp_jax.optim._quantized_state import QuantizedState as QuantizedState
