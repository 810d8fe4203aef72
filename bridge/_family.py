"""What there is to know of a model family: fields, rules, and what is refused."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from bridge._mapping import Mapping as WeightMapping
from bridge._rules import Rule
from bridge.models import DecoderConfig

REQUIRED = object()
"""In place of a default: a config file without the field is refused."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of models, as a table.

    Args:
      model_type: The `model_type` of its config files.
      architecture: The class of transformers that its checkpoints are of.
      fields: Fields of the config file that are fields of `DecoderConfig`, with the
        value that transformers takes when the file does not say.
      fixed: Fields of which one value is modelled; any other is refused.
      rules: The weight rules that hold for a config.
      ignore: Tensors that old checkpoints hold and nobody reads.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, Any]
    fixed: Mapping[str, Any]
    rules: Callable[[DecoderConfig], tuple[Rule, ...]]
    ignore: Callable[[DecoderConfig], tuple[str, ...]]

    def mapping(self, config: DecoderConfig) -> WeightMapping:
        """Returns the rules that hold for a config, with its sizes."""
        return WeightMapping(self.rules(config), _sizes(config), self.ignore(config))


def _sizes(config: DecoderConfig) -> dict[str, int]:
    return {
        "layer": config.num_hidden_layers,
        "vocab": config.vocab_size,
        "embed": config.hidden_size,
        "mlp": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
    }
