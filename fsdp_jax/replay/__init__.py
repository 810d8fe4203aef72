"""Replay: a step done again on other devices, and digests of states."""

from fsdp_jax.replay._check import CorruptionError as CorruptionError
from fsdp_jax.replay._check import ReplayCheck as ReplayCheck
from fsdp_jax.replay._check import ReplayStep as ReplayStep
from fsdp_jax.replay._digest import DeviceDigests as DeviceDigests
from fsdp_jax.replay._digest import StateDigest as StateDigest
from fsdp_jax.replay._digest import device_digests as device_digests
from fsdp_jax.replay._digest import state_digest as state_digest
from fsdp_jax.replay._suspects import CorruptionReport as CorruptionReport
