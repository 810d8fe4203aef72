"""Bit-exact conversion of weights and configs: Hugging Face, PyTorch, Megatron, JAX.

`load_hf`, `load_megatron` and `from_torch` load a checkpoint into an abstract tree
(leaves are `jax.ShapeDtypeStruct`); `save_hf`, `save_megatron` and `to_torch` write
a tree of arrays. torch is imported only by `to_torch`, and by `from_torch` if it is
given torch tensors.
"""

from bridge import adapt as adapt
from bridge import handover as handover
from bridge import megatron as megatron
from bridge import models as models
from bridge.formats._edits import Edits as Edits
from bridge.formats._source import Source as Source
from bridge.formats._weight_files import open_checkpoint as open_checkpoint
from bridge.hf._config import from_hf_config as from_hf_config
from bridge.hf._config import left_out_fields as left_out_fields
from bridge.hf._config import to_hf_config as to_hf_config
from bridge.hf._hf_checkpoint import lazy_hf as lazy_hf
from bridge.hf._hub import resolve as resolve
from bridge.hf._import_plan import ImportPlan as ImportPlan
from bridge.hf._import_plan import PlannedLeaf as PlannedLeaf
from bridge.hf._import_plan import plan as plan
from bridge.hf._load_hf import load_hf as load_hf
from bridge.hf._save import save_hf as save_hf
from bridge.lora._lora import Lora as Lora
from bridge.lora._lora import load_lora as load_lora
from bridge.lora._lora import save_lora as save_lora
from bridge.lora._lora_config import LoraConfig as LoraConfig
from bridge.lora._lora_merge import load_hf_with_lora as load_hf_with_lora
from bridge.lora._lora_targets import lora_targets as lora_targets
from bridge.megatron._decoder import load_megatron as load_megatron
from bridge.megatron._save import save_megatron as save_megatron
from bridge.pytorch._from_torch import from_torch as from_torch
from bridge.pytorch._propose import Proposal as Proposal
from bridge.pytorch._propose import propose_rules as propose_rules
from bridge.pytorch._to_torch import to_torch as to_torch
from bridge.rules._mapping import Mapping as Mapping
from bridge.rules._rules import Rule as Rule
from bridge.streaming._edit import edit_safetensors as edit_safetensors
from bridge.streaming._merged import merge as merge
