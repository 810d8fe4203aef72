"""Config of the indexer of attention to blocks of keys."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes


@dataclasses.dataclass(frozen=True)
class BlockIndexerConfig:
    """Sizes of an indexer, which selects the blocks of keys that a query attends to.

    Args:
      num_heads: Number of its heads, each of which selects for as many key heads.
      head_dim: Width of its heads.
      block_size: Number of consecutive keys of a text in a block.
      num_blocks: Number of blocks that are selected for a query.
      num_local_blocks: Number of these that are its own and the ones before it,
        whatever their scores.

    Raises:
      ValueError: If a field has an invalid value, or fields are inconsistent.

    Source: transformers `modeling_minimax_m3_vl.py::MiniMaxM3VLIndexer`.
    """

    num_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    num_local_blocks: int = 1

    def __post_init__(self):
        """Validates the fields, then their consistency."""
        sizes = ("num_heads", "head_dim", "block_size", "num_blocks")
        wrong = wrong_fields(self) or wrong_sizes(self, sizes)
        if not wrong and not 0 <= self.num_local_blocks <= self.num_blocks:
            wrong.append(
                f"num_local_blocks {self.num_local_blocks}: none to num_blocks "
                f"{self.num_blocks}"
            )
        raise_if("BlockIndexerConfig", wrong)

    @property
    def num_keys(self) -> int:
        """Number of keys of a row up to which all blocks are selected."""
        return self.block_size * self.num_blocks
