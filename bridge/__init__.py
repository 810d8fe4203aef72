"""Weights and configs between Hugging Face, PyTorch, Megatron and JAX: exact.

`load_hf`, `load_megatron` and `from_torch` fill a mould, a tree of
`jax.ShapeDtypeStruct`, from a checkpoint; `save_hf`, `save_megatron` and `to_torch`
write one from a tree of arrays. torch is imported by none but the last.
"""

from bridge import adapt as adapt
from bridge import megatron as megatron
from bridge import models as models
from bridge._config import from_hf_config as from_hf_config
from bridge._config import to_hf_config as to_hf_config
from bridge._from_torch import from_torch as from_torch
from bridge._hf_checkpoint import lazy_hf as lazy_hf
from bridge._hub import resolve as resolve
from bridge._import_plan import ImportPlan as ImportPlan
from bridge._import_plan import PlannedLeaf as PlannedLeaf
from bridge._import_plan import plan as plan
from bridge._load_hf import load_hf as load_hf
from bridge._lora import Lora as Lora
from bridge._lora import load_lora as load_lora
from bridge._lora import save_lora as save_lora
from bridge._lora_config import LoraConfig as LoraConfig
from bridge._lora_merge import load_hf_with_lora as load_hf_with_lora
from bridge._mapping import Mapping as Mapping
from bridge._propose import Proposal as Proposal
from bridge._propose import propose_rules as propose_rules
from bridge._rules import Rule as Rule
from bridge._save import save_hf as save_hf
from bridge._source import Source as Source
from bridge._source import open_checkpoint as open_checkpoint
from bridge._to_torch import to_torch as to_torch
from bridge.megatron._decoder import load_megatron as load_megatron
from bridge.megatron._decoder import save_megatron as save_megatron
