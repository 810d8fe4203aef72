"""Sharding plan: which device stores which part of each array. No collectives."""

from fsdp_jax._tree import named_leaves as named_leaves
from fsdp_jax.sharding._annotations import annotated_dims as annotated_dims
from fsdp_jax.sharding._block_float8_gather import (
    BlockFloat8Gather as BlockFloat8Gather,
)
from fsdp_jax.sharding._chunks import Chunk as Chunk
from fsdp_jax.sharding._chunks import chunks as chunks
from fsdp_jax.sharding._chunks import split_chunks as split_chunks
from fsdp_jax.sharding._chunks import validate_chunks as validate_chunks
from fsdp_jax.sharding._config import FSDPConfig as FSDPConfig
from fsdp_jax.sharding._config import Placements as Placements
from fsdp_jax.sharding._float8_gather import Float8Gather as Float8Gather
from fsdp_jax.sharding._float8_gather import MXFP8Gather as MXFP8Gather
from fsdp_jax.sharding._fully_shard import fully_shard as fully_shard
from fsdp_jax.sharding._mesh import make_mesh as make_mesh
from fsdp_jax.sharding._nvfp4_gather import NVFP4Gather as NVFP4Gather
from fsdp_jax.sharding._offload import OffloadPolicy as OffloadPolicy
from fsdp_jax.sharding._padded import Padded as Padded
from fsdp_jax.sharding._padded import unpack as unpack
from fsdp_jax.sharding._param_plan import ParamKind as ParamKind
from fsdp_jax.sharding._param_plan import ParamPlan as ParamPlan
from fsdp_jax.sharding._param_plan import UnitPolicy as UnitPolicy
from fsdp_jax.sharding._param_split import ParamSplit as ParamSplit
from fsdp_jax.sharding._pipeline_config import PipelineConfig as PipelineConfig
from fsdp_jax.sharding._plan import Plan as Plan
from fsdp_jax.sharding._precision import MixedPrecisionPolicy as MixedPrecisionPolicy
from fsdp_jax.sharding._units import Stacked as Stacked
