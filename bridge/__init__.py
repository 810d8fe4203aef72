"""Weights and configs between Hugging Face and JAX: exact, streaming, without torch.

`load_hf` fills a mould, a tree of `jax.ShapeDtypeStruct`, from safetensors files;
`save_hf` writes such files from a tree of arrays.
"""

from bridge import models as models
from bridge._config import from_hf_config as from_hf_config
from bridge._config import to_hf_config as to_hf_config
from bridge._hub import resolve as resolve
from bridge._import_plan import ImportPlan as ImportPlan
from bridge._import_plan import PlannedLeaf as PlannedLeaf
from bridge._import_plan import plan as plan
from bridge._load import load_hf as load_hf
from bridge._mapping import Mapping as Mapping
from bridge._rules import Rule as Rule
from bridge._save import save_hf as save_hf
from bridge._source import Source as Source
from bridge._source import open_checkpoint as open_checkpoint
