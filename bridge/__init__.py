"""Weights and configs between Hugging Face, Megatron and JAX: exact, without torch.

`load_hf` and `load_megatron` fill a mould, a tree of `jax.ShapeDtypeStruct`, from a
checkpoint; `save_hf` and `save_megatron` write one from a tree of arrays.
"""

from bridge import megatron as megatron
from bridge import models as models
from bridge._config import from_hf_config as from_hf_config
from bridge._config import to_hf_config as to_hf_config
from bridge._hub import resolve as resolve
from bridge._load import load_hf as load_hf
from bridge._mapping import Mapping as Mapping
from bridge._rules import Rule as Rule
from bridge._save import save_hf as save_hf
from bridge._source import Source as Source
from bridge._source import open_checkpoint as open_checkpoint
from bridge.megatron._decoder import load_megatron as load_megatron
from bridge.megatron._decoder import save_megatron as save_megatron
