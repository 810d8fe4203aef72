"""Estimates of a step's memory and time for GPUs that are not present."""

from fsdp_jax.planner._comm_table import SentRow as SentRow
from fsdp_jax.planner._comm_table import sent_grid as sent_grid
from fsdp_jax.planner._compile import gpu_devices as gpu_devices
from fsdp_jax.planner._estimate import count_on_cpu as count_on_cpu
from fsdp_jax.planner._estimate import estimate_step as estimate_step
from fsdp_jax.planner._gpu import GPU as GPU
from fsdp_jax.planner._gpu import GPUS as GPUS
from fsdp_jax.planner._gpu import CostModel as CostModel
from fsdp_jax.planner._gpu import find_gpu as find_gpu
from fsdp_jax.planner._memory import Memory as Memory
from fsdp_jax.planner._step_estimate import StepEstimate as StepEstimate
from fsdp_jax.planner._sweep import Sweep as Sweep
