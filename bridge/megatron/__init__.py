"""Megatron-Core checkpoints, configs and buffers; needs neither Megatron nor torch."""

from bridge.megatron import buffers as buffers
from bridge.megatron._adam import Adam as Adam
from bridge.megatron._adam import load_megatron_adam as load_megatron_adam
from bridge.megatron._convert import convert_megatron as convert_megatron
from bridge.megatron._decoder import decoder_source as decoder_source
from bridge.megatron._decoder import lazy_megatron as lazy_megatron
from bridge.megatron._decoder import megatron_tensors as megatron_tensors
from bridge.megatron._decoder import plan_megatron as plan_megatron
from bridge.megatron._edit import edit_distributed as edit_distributed
from bridge.megatron._hybrid import to_gpt as to_gpt
from bridge.megatron._hybrid import to_hybrid as to_hybrid
from bridge.megatron._save_adam import save_megatron_adam as save_megatron_adam
from bridge.megatron._vocab import trim_vocab as trim_vocab
from bridge.megatron._weight_rules import weight_mapping as weight_mapping
from bridge.megatron._weight_rules import weight_rules as weight_rules
from bridge.megatron.config._args import from_args as from_args
from bridge.megatron.config._args import to_args as to_args
from bridge.megatron.config._family import TWINS as TWINS
from bridge.megatron.config._transformer_config import (
    from_transformer_config as from_transformer_config,
)
from bridge.megatron.config._transformer_config import to_gpt_model as to_gpt_model
from bridge.megatron.config._transformer_config import (
    to_transformer_config as to_transformer_config,
)
from bridge.megatron.read._adam_settings import AdamSettings as AdamSettings
from bridge.megatron.read._checkpoint import MegatronCheckpoint as MegatronCheckpoint
from bridge.megatron.read._checkpoint import open_megatron as open_megatron
from bridge.megatron.read._find import is_megatron as is_megatron
from bridge.megatron.read._optimizer import MegatronOptimizer as MegatronOptimizer
from bridge.megatron.write._checkpoint import write_megatron as write_megatron
from bridge.megatron.write._settings import plain_args as plain_args
