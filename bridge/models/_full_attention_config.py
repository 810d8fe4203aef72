"""Config of the full-attention layers of a decoder whose other layers slide."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes


@dataclasses.dataclass(frozen=True)
class FullAttentionConfig:
    """Sizes of full-attention layers, where sliding ones have those of the decoder.

    Args:
      head_dim: Width of a head.
      num_key_value_heads: Number of key and value heads.
      shared_key_value: Whether values are the projected keys, before their norm and
        rope.
      sinks: Whether they have the attention sinks of the decoder.
      num_attention_heads: Number of query heads; None for that of the decoder.

    Raises:
      ValueError: If a field has an invalid value.

    Source: transformers `modeling_gemma4.py::Gemma4TextAttention`,
      `modeling_mimo_v2_flash.py::MiMoV2FlashAttention`,
      `modeling_laguna.py::LagunaAttention`.
    """

    head_dim: int
    num_key_value_heads: int
    shared_key_value: bool = False
    sinks: bool = True
    num_attention_heads: int | None = None

    def __post_init__(self):
        """Validates the fields."""
        sizes = ("head_dim", "num_key_value_heads", "num_attention_heads")
        wrong = wrong_fields(self) or wrong_sizes(self, sizes)
        raise_if("FullAttentionConfig", wrong)
