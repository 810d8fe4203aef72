"""Sharded checkpoints: saved atomically, loaded onto any mesh, never cast silently."""

from fsdp_jax.checkpoint._assets import load_files as load_files
from fsdp_jax.checkpoint._background_saves import NotSavedError as NotSavedError
from fsdp_jax.checkpoint._bucket import ObjectStoreError as ObjectStoreError
from fsdp_jax.checkpoint._checkpointer import Checkpointer as Checkpointer
from fsdp_jax.checkpoint._keep_best import KeepBest as KeepBest
from fsdp_jax.checkpoint._load import load as load
from fsdp_jax.checkpoint._load import load_average as load_average
from fsdp_jax.checkpoint._load import load_metadata as load_metadata
from fsdp_jax.checkpoint._load import load_params as load_params
from fsdp_jax.checkpoint._load import load_shapes as load_shapes
from fsdp_jax.checkpoint._manifest import (
    DamagedCheckpointError as DamagedCheckpointError,
)
from fsdp_jax.checkpoint._matching import Loaded as Loaded
from fsdp_jax.checkpoint._multihost import OtherProcessError as OtherProcessError
from fsdp_jax.checkpoint._objects import Checkpointable as Checkpointable
from fsdp_jax.checkpoint._objects import PerProcess as PerProcess
from fsdp_jax.checkpoint._objects import Stateful as Stateful
from fsdp_jax.checkpoint._remove import remove as remove
from fsdp_jax.checkpoint._save import save as save
from fsdp_jax.checkpoint._steps import latest_step as latest_step
from fsdp_jax.checkpoint._verify import Verified as Verified
from fsdp_jax.checkpoint._verify import verify as verify
from fsdp_jax.checkpoint.local._replication import (
    make_replication_groups as make_replication_groups,
)
from fsdp_jax.checkpoint.local._store import LocalCheckpoints as LocalCheckpoints
