"""Config of the indexer of sparse attention."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """Sizes of an indexer, which selects the keys that each query attends to.

    Args:
      num_heads: Number of its heads.
      head_dim: Width of its heads.
      num_selected: Number of keys that are selected for a query.
      interleaved: Whether the rope of its heads turns two adjacent dims.
      rotates_last: Whether the last dims of its heads turn; else the first.
      norm_eps: Epsilon of the norm of its keys.

    Raises:
      ValueError: If a field has an invalid value.

    Source: DeepSeek-V3.2-Exp, section 2.1; transformers
      `modeling_deepseek_v32.py::DeepseekV32Indexer`.
    """

    num_heads: int
    head_dim: int
    num_selected: int
    interleaved: bool = False
    rotates_last: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self):
        """Validates the fields."""
        sizes = ("num_heads", "head_dim", "num_selected")
        wrong = wrong_fields(self) or wrong_sizes(self, sizes)
        raise_if("IndexerConfig", wrong)
