"""Paths of parameters that no gradient trains."""

from bridge.models._block_sparse_attention import block_indexer_paths
from bridge.models._compressed_attention import entry_indexer_paths
from bridge.models._config import DecoderConfig
from bridge.models._indexed_attention import indexer_paths
from bridge.models._token_experts import token_expert_paths
from bridge.models._xielu import activation_constants


def constant_paths(config: DecoderConfig) -> tuple[str, ...]:
    """Returns the paths of constants of activations and layers, and of indexers.

    For `FSDPConfig(frozen=...)`; empty without either. An indexer selects keys, which
    is not differentiable. A table of the experts of each token is such a constant.

    Args:
      config: Config of the decoder.
    """
    scales = tuple(f"{stack.path}.layer_scalar" for stack in config.layer_stacks)
    own = scales if config.layer_scale else ()
    indexers = indexer_paths(config) + block_indexer_paths(config)
    indexers += entry_indexer_paths(config)
    tables = token_expert_paths(config)
    return activation_constants(config) + indexers + tables + own
