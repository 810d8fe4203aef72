"""Estimates of a step's memory and time for GPUs that are not present."""

from fsdp_jax.planner._comm_table import SentRow as SentRow
from fsdp_jax.planner._comm_table import sent_grid as sent_grid
from fsdp_jax.planner._compile import gpu_devices as gpu_devices
from fsdp_jax.planner._cpu_count import CpuCount as CpuCount
from fsdp_jax.planner._cpu_count import count_on_cpu as count_on_cpu
from fsdp_jax.planner._estimate import estimate_step as estimate_step
from fsdp_jax.planner._explain import Explanation as Explanation
from fsdp_jax.planner._explain import PlannedStep as PlannedStep
from fsdp_jax.planner._explain import read_plan as read_plan
from fsdp_jax.planner._gpu import GPU as GPU
from fsdp_jax.planner._gpu import GPUS as GPUS
from fsdp_jax.planner._gpu import CostModel as CostModel
from fsdp_jax.planner._gpu import find_gpu as find_gpu
from fsdp_jax.planner._memory import Memory as Memory
from fsdp_jax.planner._model_flops import model_flops as model_flops
from fsdp_jax.planner._profile import ProfiledStep as ProfiledStep
from fsdp_jax.planner._profile import read_profile as read_profile
from fsdp_jax.planner._search import Knob as Knob
from fsdp_jax.planner._search import Search as Search
from fsdp_jax.planner._search import Trial as Trial
from fsdp_jax.planner._search import search_schedules as search_schedules
from fsdp_jax.planner._step_estimate import StepEstimate as StepEstimate
from fsdp_jax.planner._sweep import Sweep as Sweep
from fsdp_jax.planner._unit_times import UnitTime as UnitTime
