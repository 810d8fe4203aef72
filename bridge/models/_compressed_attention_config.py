"""Config of attention to single tokens and to entries that each stand for several."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes


@dataclasses.dataclass(frozen=True)
class CompressedAttentionConfig:
    """Sizes of attention with one shared head of keys that are also the values.

    All layers slide. Layers of type `compressed_sparse_attention` and
    `heavily_compressed_attention` also attend to entries, each a weighted mean of a
    window of tokens; in the former an indexer selects the entries of each query.

    Args:
      q_lora_rank: Width of the latent vector of queries.
      o_groups: Number of groups of heads whose outputs are projected apart.
      o_lora_rank: Width that each group is projected to.
      sparse_rate: Number of tokens from one entry to the next in layers with an
        indexer. An entry there is of the tokens of two windows.
      heavy_rate: Number of tokens of an entry in the other layers with entries.
      index_num_heads: Number of heads of the indexer.
      index_head_dim: Width of its heads.
      index_num_selected: Number of entries that are selected for a query.

    Raises:
      ValueError: If a size is not a positive integer.

    Source: transformers `modeling_deepseek_v4.py::DeepseekV4Attention`,
      `DeepseekV4CSACompressor`, `DeepseekV4HCACompressor`.
    """

    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sparse_rate: int
    heavy_rate: int
    index_num_heads: int
    index_head_dim: int
    index_num_selected: int

    def __post_init__(self):
        """Validates the sizes."""
        names = tuple(field.name for field in dataclasses.fields(self))
        raise_if(
            "CompressedAttentionConfig", wrong_fields(self) or wrong_sizes(self, names)
        )
