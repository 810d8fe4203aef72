"""Parameter specification for layouts: a name, a shape, a dtype and a few flags."""

import dataclasses
import math
from typing import Literal


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Trainable parameter as one model-parallel rank holds it.

    Leave out frozen parameters: they have no gradient and take no space in a buffer.

    Args:
      name: Path of the parameter, unique in its model.
      shape: Shape on this rank, after tensor and pipeline parallelism.
      dtype: Dtype of the values; for a quantized parameter, its unquantized dtype.
      storage: Storage format of the values; quantized values lie in a uint8 buffer.
      is_expert: Whether the parameter belongs to an expert (Megatron's
        `allreduce=False`), so that its gradient is reduced over fewer ranks.
      shared_embedding: Whether the first and the last pipeline stage both hold the
        parameter.
      is_embedding_or_output: Whether the parameter is an embedding or the output
        layer, which Adam updates instead of Muon.
      use_muon: False for a matrix explicitly excluded from Muon.
      gtp_size: Number of ranks over which dim 0 is split and must be gathered before
        Muon's update.
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
        """Number of values on this rank, regardless of storage format."""
        return math.prod(self.shape)

    @property
    def stored_dtype(self) -> str:
        """Dtype of the buffer that contains the parameter."""
        return self.dtype if self.storage == "plain" else "uint8"
