"""Train state, and the training, evaluation and forward steps."""

from fsdp_jax.training._compiler_options import compiler_options as compiler_options
from fsdp_jax.training._eval_step import make_eval_step as make_eval_step
from fsdp_jax.training._eval_step import make_forward as make_forward
from fsdp_jax.training._grad_check import largest_grads as largest_grads
from fsdp_jax.training._lora_params import abstract_base_params as abstract_base_params
from fsdp_jax.training._lora_params import add_lora as add_lora
from fsdp_jax.training._lora_params import merge_lora as merge_lora
from fsdp_jax.training._lora_params import trained_state as trained_state
from fsdp_jax.training._lora_params import with_frozen as with_frozen
from fsdp_jax.training._loss_scale import LossScale as LossScale
from fsdp_jax.training._loss_scale import ScaleState as ScaleState
from fsdp_jax.training._memory_check import MemoryWarning as MemoryWarning
from fsdp_jax.training._offloaded_state import offload_state as offload_state
from fsdp_jax.training._offloaded_state import onload_state as onload_state
from fsdp_jax.training._state import TrainState as TrainState
from fsdp_jax.training._state import abstract_state as abstract_state
from fsdp_jax.training._state import init_params as init_params
from fsdp_jax.training._state import init_state as init_state
from fsdp_jax.training._state import unshard as unshard
from fsdp_jax.training._train_step import TrainStep as TrainStep
from fsdp_jax.training._train_step import make_train_step as make_train_step
from fsdp_jax.training._train_step import value_and_grad as value_and_grad
from fsdp_jax.training._trainable import apply_updates as apply_updates
from fsdp_jax.training._trainable import trainable as trainable
