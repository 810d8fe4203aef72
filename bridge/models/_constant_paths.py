"""Paths of parameters that no gradient trains."""

from bridge.models._config import DecoderConfig
from bridge.models._indexed_attention import indexer_paths
from bridge.models._xielu import activation_constants


def constant_paths(config: DecoderConfig) -> tuple[str, ...]:
    """Returns the paths of an activation's constants, and of indexers.

    For `FSDPConfig(frozen=...)`; empty without either. An indexer selects keys, which
    is not differentiable.

    Args:
      config: Config of the decoder.
    """
    return activation_constants(config) + indexer_paths(config)
