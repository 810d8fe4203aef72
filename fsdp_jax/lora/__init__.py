"""Low-rank adapters: configuration, factored products, quantized base weights."""

from fsdp_jax.lora._config import LoRAConfig as LoRAConfig
from fsdp_jax.lora._config import LoRATarget as LoRATarget
