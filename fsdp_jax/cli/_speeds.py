"""Options that replace figures of a GPU."""

from __future__ import annotations

import dataclasses
import math

from fsdp_jax.cli._options import Unset
from fsdp_jax.planner import GPU, find_gpu


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Figures of a GPU, instead of those that are listed for it.

    Attributes:
      gpu_memory_gb: Memory of the GPU, GB.
      tflops: Speed of 16-bit matrix products, TFLOP/s.
      memory_gbs: Bandwidth of the GPU's memory, GB/s.
      link_gbs: Bandwidth to the other GPUs of a node, GB/s a GPU.
      network_gbs: Bandwidth to other nodes, GB/s a GPU.
      latency_us: Latency of each collective, microseconds.
      gpus_per_node: GPUs of a node, which links connect; default 8, and 72 of gb200 and
        gb300.
    """

    gpu_memory_gb: Unset[float] = None
    tflops: Unset[float] = None
    memory_gbs: Unset[float] = None
    link_gbs: Unset[float] = None
    network_gbs: Unset[float] = None
    latency_us: Unset[float] = None
    gpus_per_node: Unset[int] = None

    def apply(self, gpu: str) -> GPU:
        """Returns the GPU of that name, with these figures.

        Raises:
          ValueError: If a figure is not a finite number above 0, or no GPU has the
            name.
        """
        names = [field.name for field in dataclasses.fields(self)]
        given = {name: getattr(self, name) for name in names}
        wrong = [
            f"--{name.replace('_', '-')} {value}: a finite number above 0"
            for name, value in given.items()
            if value is not None and not 0 < value < math.inf
        ]
        if wrong:
            raise ValueError(f"{'; '.join(wrong)}.")
        scaled = {
            "flops": (self.tflops, 1e12),
            "memory_bandwidth": (self.memory_gbs, 1e9),
            "link_bandwidth": (self.link_gbs, 1e9),
            "network_bandwidth": (self.network_gbs, 1e9),
            "latency": (self.latency_us, 1e-6),
            "devices_per_node": (self.gpus_per_node, 1),
        }
        costs = {k: v * unit for k, (v, unit) in scaled.items() if v is not None}
        memory = None if self.gpu_memory_gb is None else self.gpu_memory_gb * 1e9
        return find_gpu(gpu, memory=memory, **costs)
