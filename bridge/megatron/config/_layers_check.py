"""Whether Megatron has the layers of a model: of its GPT, or of its hybrid model."""

from bridge.megatron.config._transformer_config import to_transformer_config
from bridge.models import DecoderConfig

# Families whose layers are those of Megatron's hybrid model, one sub-block each.
_HYBRID = ("nemotron_h",)


def check_layers(config: DecoderConfig) -> None:
    """Raises a `ValueError` if Megatron's layers cannot be this model's.

    Args:
      config: Model config.
    """
    if config.model_type not in _HYBRID:
        to_transformer_config(config)
