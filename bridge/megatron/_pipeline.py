"""Pipeline stages: assignment of layers and experts to model-parallel ranks."""

import re
from typing import NamedTuple

from bridge.megatron._ranks import ParallelSizes

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(?=\.)")
_EXPERT = re.compile(r"(\.mlp\.experts\.)(\d+)(?=\.)")


class Pipeline(NamedTuple):
    """Even distribution of layers and experts over model-parallel ranks.

    Args:
      sizes: Number of ranks of each kind.
      num_chunks: Number of model chunks per stage (VPP); 1 without a virtual pipeline.
      num_layers: Number of layers of the model.
      num_experts: Number of experts per layer; 0 for dense models.
    """

    sizes: ParallelSizes
    num_chunks: int
    num_layers: int
    num_experts: int

    def place(self, name: str) -> tuple[int, int, str]:
        """Returns a tensor's stage, chunk, and name with a stage-local layer number."""
        match = _LAYER.match(name)
        if match is None:  # embeddings in the first chunk, final norm and head last
            first = name.startswith("embedding.")
            return (
                (0, 0, name)
                if first
                else (self.sizes.pp - 1, self.num_chunks - 1, name)
            )
        per_chunk = self.num_layers // (self.sizes.pp * self.num_chunks)
        # Chunks are assigned to stages round-robin: chunk 0 of all stages comes first.
        chunk, stage = divmod(int(match[2]) // per_chunk, self.sizes.pp)
        local = int(match[2]) % per_chunk
        return stage, chunk, _LAYER.sub(rf"\g<1>{local}", name)

    def expert(self, name: str) -> tuple[int | None, str]:
        """Returns a tensor's expert-parallel rank (None: all) and its local name."""
        match = _EXPERT.search(name)
        if match is None:
            return None, name
        rank, local = divmod(int(match[2]), self.num_experts // self.sizes.ep)
        return rank, _EXPERT.sub(rf"\g<1>{local}", name)
