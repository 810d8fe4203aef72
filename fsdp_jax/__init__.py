"""Fully sharded data parallelism for your own JAX model, on a mesh of GPUs."""

from fsdp_jax._config import FSDPConfig as FSDPConfig
from fsdp_jax._config import MixedPrecisionPolicy as MixedPrecisionPolicy
from fsdp_jax._fully_shard import Stacked as Stacked
from fsdp_jax._fully_shard import fully_shard as fully_shard
from fsdp_jax._mesh import make_mesh as make_mesh
from fsdp_jax._plan import ParamPlan as ParamPlan
from fsdp_jax._plan import Placements as Placements
from fsdp_jax._plan import Plan as Plan
from fsdp_jax._scan import scan as scan
from fsdp_jax._state import TrainState as TrainState
from fsdp_jax._state import abstract_state as abstract_state
from fsdp_jax._state import gather as gather
from fsdp_jax._state import init as init
from fsdp_jax._state import init_params as init_params
from fsdp_jax._step import TrainStep as TrainStep
from fsdp_jax._step import make_eval_step as make_eval_step
from fsdp_jax._step import make_train_step as make_train_step
from fsdp_jax._step import value_and_grad as value_and_grad
from fsdp_jax._tree import named_leaves as named_leaves
from fsdp_jax._unit import unit as unit
from fsdp_jax.checkpoint import latest_step as latest_step
from fsdp_jax.checkpoint import load as load
from fsdp_jax.checkpoint import load_metadata as load_metadata
from fsdp_jax.checkpoint import load_params as load_params
from fsdp_jax.checkpoint import save as save
