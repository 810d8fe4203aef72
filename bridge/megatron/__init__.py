"""Megatron-Core's files and buffers, read without Megatron and without torch."""

from bridge.megatron import buckets as buckets
from bridge.megatron._checkpoint import MegatronCheckpoint as MegatronCheckpoint
from bridge.megatron._checkpoint import open_megatron as open_megatron
from bridge.megatron._optimizer import MegatronOptimizer as MegatronOptimizer
from bridge.megatron._save import plain_args as plain_args
from bridge.megatron._save import save_megatron as save_megatron
from bridge.megatron._vocab import trim_vocab as trim_vocab
