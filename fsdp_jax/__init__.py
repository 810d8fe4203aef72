"""Fully sharded data parallelism for your own JAX model, on a mesh of GPUs."""

__version__ = "0.1.0"

# First of all: it imports jax, which in the command line is to say nothing of CUDA.
from fsdp_jax import _quiet_import as _quiet_import

# isort: split
from fsdp_jax import audit as audit
from fsdp_jax import checkpoint as checkpoint
from fsdp_jax import data as data
from fsdp_jax import launch as launch
from fsdp_jax import lora as lora
from fsdp_jax import notebook as notebook
from fsdp_jax import ops as ops
from fsdp_jax import optim as optim
from fsdp_jax import planner as planner
from fsdp_jax import replay as replay
from fsdp_jax import resharding as resharding
from fsdp_jax import rl as rl
from fsdp_jax import sharding as sharding
from fsdp_jax import step as step
from fsdp_jax import training as training
from fsdp_jax.audit import audit_step as audit_step
from fsdp_jax.checkpoint import Checkpointer as Checkpointer
from fsdp_jax.checkpoint import latest_step as latest_step
from fsdp_jax.checkpoint import load as load
from fsdp_jax.checkpoint import save as save
from fsdp_jax.data import HostBatches as HostBatches
from fsdp_jax.data import global_batch as global_batch
from fsdp_jax.data import host_shard as host_shard
from fsdp_jax.launch import initialize as initialize
from fsdp_jax.lora import LoRAConfig as LoRAConfig
from fsdp_jax.planner import estimate_step as estimate_step
from fsdp_jax.resharding import reshard as reshard
from fsdp_jax.sharding import FSDPConfig as FSDPConfig
from fsdp_jax.sharding import MixedPrecisionPolicy as MixedPrecisionPolicy
from fsdp_jax.sharding import OffloadPolicy as OffloadPolicy
from fsdp_jax.sharding import Padded as Padded
from fsdp_jax.sharding import ParamPlan as ParamPlan
from fsdp_jax.sharding import PipelineConfig as PipelineConfig
from fsdp_jax.sharding import Placements as Placements
from fsdp_jax.sharding import Plan as Plan
from fsdp_jax.sharding import Stacked as Stacked
from fsdp_jax.sharding import fully_shard as fully_shard
from fsdp_jax.sharding import make_mesh as make_mesh
from fsdp_jax.step import scan as scan
from fsdp_jax.step import unit as unit
from fsdp_jax.training import TrainState as TrainState
from fsdp_jax.training import abstract_state as abstract_state
from fsdp_jax.training import init_params as init_params
from fsdp_jax.training import init_state as init_state
from fsdp_jax.training import make_eval_step as make_eval_step
from fsdp_jax.training import make_forward as make_forward
from fsdp_jax.training import make_train_step as make_train_step
from fsdp_jax.training import trainable as trainable
from fsdp_jax.training import unshard as unshard
from fsdp_jax.training import value_and_grad as value_and_grad
