"""GPUs that a step can be compiled for, with their cost models."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Sustained speeds of a device; every figure can be replaced.

    The figures of `GPUS` are what large matrices, copies and rings reach, which is
    below the data sheet.

    Attributes:
      flops: FLOP/s of matrix products in 16-bit floats.
      memory_bandwidth: Bytes/s of reads and writes to device memory.
      link_bandwidth: Bytes/s sent to the other devices of the node.
      network_bandwidth: Bytes/s sent to other nodes.
      latency: Seconds added to each collective.
      devices_per_node: Devices connected by links.
      peak_flops: FLOP/s of the data sheet, for model FLOPs utilization only.
      host_bandwidth: Bytes/s between a device and its host, in one direction.
    """

    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    latency: float
    devices_per_node: int
    peak_flops: float
    host_bandwidth: float = 50e9


@dataclasses.dataclass(frozen=True)
class GPU:
    """A kind of GPU.

    Attributes:
      name: Value of `--gpu`.
      description: Device name reported by the driver.
      memory: Device memory in bytes.
      compute_capability: CUDA compute capability `(major, minor)`.
      cores: Number of streaming multiprocessors.
      l2_cache: L2 cache in bytes.
      shared_memory: Maximum shared memory of a block in bytes.
      clock: Clock rate in GHz.
      data_sheet_bandwidth: Memory bandwidth of the data sheet in bytes/s.
      cost: Cost model.
    """

    name: str
    description: str
    memory: int
    compute_capability: tuple[int, int]
    cores: int
    l2_cache: int
    shared_memory: int
    clock: float
    data_sheet_bandwidth: int
    cost: CostModel

    @property
    def target_config(self) -> str:
        """XLA's target config for this GPU, as the text of a protobuf."""
        major, minor = self.compute_capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory + 1024}
  shared_memory_per_block_optin: {self.shared_memory}
  threads_per_core_limit: 2048
  core_count: {self.cores}
  fpus_per_core: {64 if (major, minor) == (8, 0) else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.data_sheet_bandwidth}
  l2_cache_size: {self.l2_cache}
  clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{self.description}"
"""


def _cost(
    flops: float,
    memory: float,
    links: float,
    network: float,
    peak_flops: float,
    host: float = 50,
) -> CostModel:
    """Returns the cost model of nodes of 8 GPUs, from TFLOP/s and GB/s."""
    return CostModel(
        flops=flops * 1e12,
        memory_bandwidth=memory * 1e9,
        link_bandwidth=links * 1e9,
        network_bandwidth=network * 1e9,
        latency=15e-6,
        devices_per_node=8,
        peak_flops=peak_flops * 1e12,
        host_bandwidth=host * 1e9,
    )


GPUS = {
    "a100": GPU(
        name="a100",
        description="NVIDIA A100-SXM4-80GB",
        memory=85_000_000_000,
        compute_capability=(8, 0),
        cores=108,
        l2_cache=40 << 20,
        shared_memory=163 << 10,
        clock=1.41,
        data_sheet_bandwidth=2_039_000_000_000,
        cost=_cost(250, 1800, links=235, network=22.5, peak_flops=312, host=25),
    ),
    "h100": GPU(
        name="h100",
        description="NVIDIA H100 80GB HBM3",
        memory=85_000_000_000,
        compute_capability=(9, 0),
        cores=132,
        l2_cache=50 << 20,
        shared_memory=227 << 10,
        clock=1.98,
        data_sheet_bandwidth=3_350_000_000_000,
        cost=_cost(790, 3000, links=350, network=45, peak_flops=989),
    ),
    "h200": GPU(
        name="h200",
        description="NVIDIA H200",
        memory=150_000_000_000,
        compute_capability=(9, 0),
        cores=132,
        l2_cache=60 << 20,
        shared_memory=227 << 10,
        clock=1.98,
        data_sheet_bandwidth=4_800_000_000_000,
        cost=_cost(790, 4300, links=350, network=45, peak_flops=989),
    ),
    "b200": GPU(
        name="b200",
        description="NVIDIA B200",
        memory=192_000_000_000,
        compute_capability=(10, 0),
        cores=148,
        l2_cache=126 << 20,
        shared_memory=227 << 10,
        clock=1.965,
        data_sheet_bandwidth=8_000_000_000_000,
        cost=_cost(1750, 7000, links=700, network=45, peak_flops=2250),
    ),
}
"""GPUs by name.

Shapes are the vendor's. Speeds are stated, not measured here: about 80 % of the 16-bit
peak, 90 % of memory and network, 78 % of links and PCIe.
"""


def find_gpu(gpu: str | GPU, **costs: float) -> GPU:
    """Returns a GPU by name, with figures of its cost model replaced.

    Args:
      gpu: Name in `GPUS`, or a GPU.
      **costs: Fields of `CostModel`.

    Raises:
      ValueError: If the name or a field is unknown, or a figure is not positive.
    """
    if isinstance(gpu, str):
        if gpu not in GPUS:
            raise ValueError(f"The GPU '{gpu}' is unknown: use {', '.join(GPUS)}.")
        gpu = GPUS[gpu]
    known = [field.name for field in dataclasses.fields(CostModel)]
    wrong = [f"{k}={v}" for k, v in costs.items() if k not in known or v <= 0]
    if wrong:
        raise ValueError(
            f"The cost model takes no {', '.join(wrong)}: its figures are positive, "
            f"and they are {', '.join(known)}."
        )
    return dataclasses.replace(gpu, cost=dataclasses.replace(gpu.cost, **costs))
