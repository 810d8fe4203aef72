"""Config of blocks whose weights several layers share."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes


@dataclasses.dataclass(frozen=True)
class SharedBlocksConfig:
    """Blocks of attention and an MLP, each run in several layers before the mixer.

    A block reads the residual stream beside the embeddings of the tokens, and has the
    heads and the width of MLPs of the decoder. The mixer of the layer reads the stream
    to which the layer's projection of the block's output is added.

    Args:
      num_blocks: Number of blocks.
      layers: Indices of the layers that run a block, each the next one in turn.
      attention_rank: Width inside the two matrices that each layer adds to the
        projections to queries, keys and values; None for none.
      mlp_rank: The same for the projections into the MLP.

    Raises:
      ValueError: If a field has an invalid value, `layers` do not ascend, or there are
        more blocks than layers.

    Source: Zamba2, https://arxiv.org/abs/2411.15242.
    """

    num_blocks: int
    layers: tuple[int, ...]
    attention_rank: int | None = None
    mlp_rank: int | None = None

    def __post_init__(self):
        """Validates the sizes and the layers."""
        names = ("num_blocks", "attention_rank", "mlp_rank")
        wrong = wrong_fields(self) or wrong_sizes(self, names)
        if not wrong and list(self.layers) != sorted(set(self.layers)):
            wrong = [f"layers {self.layers}: each once, in ascending order"]
        if not wrong and self.num_blocks > len(self.layers):
            wrong = [
                f"num_blocks {self.num_blocks} of {len(self.layers)} layers: some are "
                f"in none; set it to {len(self.layers)} or less"
            ]
        raise_if("SharedBlocksConfig", wrong)

    def block_of(self, layer: int) -> int | None:
        """Returns the index of the block that a layer runs; None if it runs none.

        Args:
          layer: Index of the layer.
        """
        if layer not in self.layers:
            return None
        return self.layers.index(layer) % self.num_blocks
