"""Pipeline stages: which layers and experts are dealt to which rank."""

import re
from typing import NamedTuple

from bridge.megatron._ranks import ParallelSizes

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(?=\.)")
_EXPERT = re.compile(r"(\.mlp\.experts\.)(\d+)(?=\.)")


class Pipeline(NamedTuple):
    """How layers and experts are dealt out.

    Args:
      sizes: Ranks of each kind.
      num_chunks: Model chunks a stage (VPP); 1 without a virtual pipeline.
      num_layers: Layers in all.
      num_experts: Experts a layer; 0 for dense models.
    """

    sizes: ParallelSizes
    num_chunks: int
    num_layers: int
    num_experts: int

    def place(self, name: str) -> tuple[int, int, str]:
        """Returns a tensor's stage, chunk, and name with the layer's local number."""
        match = _LAYER.match(name)
        if match is None:
            first = name.startswith("embedding.")
            return (
                (0, 0, name)
                if first
                else (self.sizes.pp - 1, self.num_chunks - 1, name)
            )
        per_chunk = self.num_layers // (self.sizes.pp * self.num_chunks)
        chunk, stage = divmod(int(match[2]) // per_chunk, self.sizes.pp)
        local = int(match[2]) % per_chunk
        return stage, chunk, _LAYER.sub(rf"\g<1>{local}", name)

    def expert(self, name: str) -> tuple[int | None, str]:
        """Returns an expert's rank, or None for all, and its name on that rank."""
        match = _EXPERT.search(name)
        if match is None:
            return None, name
        rank, local = divmod(int(match[2]), self.num_experts // self.sizes.ep)
        return rank, _EXPERT.sub(rf"\g<1>{local}", name)
