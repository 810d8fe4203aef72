"""Batches per host, and their placement on devices."""

from fsdp_jax.data._host_batches import HostBatches as HostBatches
from fsdp_jax.data._host_batches import HostShard as HostShard
from fsdp_jax.data._host_batches import global_batch as global_batch
from fsdp_jax.data._host_batches import host_shard as host_shard
from fsdp_jax.data._host_batches import padded_global_batch as padded_global_batch
