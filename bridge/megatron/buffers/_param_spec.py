"""Parameters as the layouts see them: a name, a shape, a dtype and a few tags."""

import dataclasses
import math
from typing import Literal


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One trainable parameter, as one rank of the model holds it.

    Frozen parameters get no gradient and so no place in a buffer: leave them out.

    Args:
      name: Path of the parameter, unique in its model.
      shape: Shape on this rank, after tensor and pipeline parallelism.
      dtype: Dtype of its values; of a quantized parameter the one it stands for.
      storage: How the values are stored; quantized ones lie in a buffer of bytes.
      is_expert: Whether it is split over experts (Megatron's `allreduce=False`), and
        so reduced over fewer data ranks.
      shared_embedding: Whether the first and the last pipeline stage both hold it.
      is_embedding_or_output: Whether it is an embedding or the output layer, which
        Muon leaves to Adam.
      use_muon: False for a matrix that was excluded from Muon by hand.
      gtp_size: Ranks over which dim 0 is split, to be gathered before Muon's update.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    storage: Literal["plain", "fp8", "nvfp4"] = "plain"
    is_expert: bool = False
    shared_embedding: bool = False
    is_embedding_or_output: bool = False
    use_muon: bool = True
    gtp_size: int = 1

    @property
    def num_elements(self) -> int:
        """Values on this rank, however they are stored."""
        return math.prod(self.shape)

    @property
    def stored_dtype(self) -> str:
        """Dtype of the buffer that it lies in."""
        return self.dtype if self.storage == "plain" else "uint8"
