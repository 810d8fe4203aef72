"""GPUs that a step can be compiled for, with their cost models."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Sustained speeds of a device; every figure can be replaced.

    The figures of `GPUS` are what training reaches, which is below the data sheet.

    Attributes:
      flops: FLOP/s of large matrix products in 16-bit floats.
      memory_bandwidth: Bytes/s of reads and writes to device memory.
      link_bandwidth: Bytes/s sent to the other devices of the node by a ring.
      network_bandwidth: Bytes/s that a device's NIC sends to other nodes.
      latency: Seconds added to each collective: its launch.
      devices_per_node: Devices connected by links.
      peak_flops: FLOP/s of the data sheet, for model FLOPs utilization only.
      host_bandwidth: Bytes/s between a device and its host, in one direction.
      switch_bandwidth: Bytes/s of an all-reduce of 8 devices in a node whose switch
        adds, counted as for a ring; 0 if it does not.
      copy_bandwidth: Bytes/s at which a collective copies what a device already has of
        the result; infinite if that is free.
      float8_speed: Speed of products in 8-bit floats relative to 16-bit.
      attention_forward: FLOP/s of fused attention over long rows; None for `flops`.
      attention_backward: FLOP/s of its backward; None for `flops`.
      attention_half_length: Tokens of a row at which fused attention has half of that.
      kernel_latency: Seconds added to each kernel.
      overlap_slowdown: Part of a kernel's speed that is lost while a collective runs.
    """

    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    latency: float
    devices_per_node: int
    peak_flops: float
    host_bandwidth: float = 50e9
    switch_bandwidth: float = 0.0
    copy_bandwidth: float = math.inf
    float8_speed: float = 2.0
    attention_forward: float | None = None
    attention_backward: float | None = None
    attention_half_length: float = 0.0
    kernel_latency: float = 0.0
    overlap_slowdown: float = 0.0


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


# The next four were fitted to published steps, by `benchmarks/validate_planner.py fit`:
# MaxText's Llama on 8 to 2,048 H100s and on 256 H200s, torchtitan's 8B on 32 and 64
# H200s, NeMo Automodel's and axlearn's on H100s. FLOAT8 and SLOWDOWN are at the bounds
# of the fit: the data sheets' ratio of the peaks, and three tenths.
MATMUL = 0.637
"""Part of the peak that large 16-bit products reach in a step, at full power."""
FLOAT8 = 2.0
"""Speed of products in 8-bit floats relative to 16-bit.

The casts are kernels of their own.
"""
MEMORY = 0.866
"""Part of the peak memory bandwidth that elementwise kernels reach."""
SLOWDOWN = 0.3
"""Part of a kernel's speed that is lost while a collective runs."""
ATTENTION = (0.61, 0.52)
"""Part of the peak of cuDNN's attention, forward and backward.

Source: FlashAttention-3 (arXiv 2407.08608), figures 5 and 6: cuDNN 9 on an H100 SXM5,
heads of 128, long rows: 600 and 516 of 989 TFLOP/s.
"""


def _cost(
    peak_flops: float,
    memory: float,
    links: float,
    nic: float,
    *,
    switch: float = 0,
    host: float = 50,
    node: int = 8,
    power: float = 1.0,
    products: float = 1.0,
) -> CostModel:
    """Returns a cost model from TFLOP/s and GB/s of the data sheet.

    Args:
      peak_flops: TFLOP/s of dense 16-bit products.
      memory: GB/s of device memory.
      links: GB/s of bus bandwidth of a ring in a node, as nccl-tests measure it.
      nic: GB/s of a NIC, as nccl-tests measure it.
      switch: GB/s of bus bandwidth of an all-reduce with NVLink SHARP.
      host: GB/s to the host.
      node: Devices of an NVLink domain.
      power: Speed of products relative to a device that is not held to less power.
      products: Part of the peak that large products reach, relative to an H100.
    """
    peak = peak_flops * 1e12
    return CostModel(
        flops=MATMUL * power * products * peak,
        memory_bandwidth=MEMORY * memory * 1e9,
        link_bandwidth=links * 1e9,
        network_bandwidth=nic * 1e9,
        latency=2e-6,
        devices_per_node=node,
        peak_flops=peak,
        host_bandwidth=host * 1e9,
        switch_bandwidth=switch * 1e9,
        copy_bandwidth=MEMORY * memory * 1e9 / 2,  # It reads and writes.
        float8_speed=FLOAT8,
        attention_forward=ATTENTION[0] * power * peak,
        attention_backward=ATTENTION[1] * power * peak,
        attention_half_length=500,
        kernel_latency=2e-6,
        overlap_slowdown=SLOWDOWN,
    )


# `products`: medians of the speeds of large 16-bit products (4,096 rows or more, and
# matrices of 4,096 x 4,096 or more) relative to an H100's with the same library, and of
# these that of the middle library; products in 8-bit floats differ by as much. Source:
# ai-dynamo/aiconfigurator@095f58a, systems/data/*/gemm.

# NVIDIA A100 data sheet: 312 TFLOP/s, 2,039 GB/s; rings: NCCL's tuning model has 235
# GB/s for compute capability 8.0; HDR InfiniBand, 200 Gb/s a GPU.
_A100 = GPU(
    name="a100",
    description="NVIDIA A100-SXM4-80GB",
    memory=85_000_000_000,
    compute_capability=(8, 0),
    cores=108,
    l2_cache=40 << 20,
    shared_memory=163 << 10,
    clock=1.41,
    data_sheet_bandwidth=2_039_000_000_000,
    cost=_cost(312, 2039, links=235, nic=22.5, host=25, products=1.08),
)
# NVIDIA A100 data sheet: the 40 GB part has 1,555 GB/s.
_A100_40GB = dataclasses.replace(
    _A100,
    name="a100-40gb",
    description="NVIDIA A100-SXM4-40GB",
    memory=42_300_000_000,
    data_sheet_bandwidth=1_555_000_000_000,
    cost=_cost(312, 1555, links=235, nic=22.5, host=25, products=1.08),
)
# NVIDIA H100 data sheet, SXM: 989 TFLOP/s, 3.35 TB/s; nccl-tests#212: 370 and 480 GB/s
# in a node; nccl-tests#290: 46-48 GB/s a NIC of 400 Gb/s.
_H100 = GPU(
    name="h100",
    description="NVIDIA H100 80GB HBM3",
    memory=85_000_000_000,
    compute_capability=(9, 0),
    cores=132,
    l2_cache=50 << 20,
    shared_memory=227 << 10,
    clock=1.98,
    data_sheet_bandwidth=3_350_000_000_000,
    cost=_cost(989, 3350, links=370, nic=47, switch=480),
)
# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 96 GB of HBM2e with 2.4 TB/s,
# held to 500 W of 700. Power that is not static (about 100 W) grows with the square of
# the clock: (400 / 600) ** 0.5.
_H100_500W = dataclasses.replace(
    _H100,
    name="h100-500w",
    description="NVIDIA H100 96GB HBM2e",
    memory=102_000_000_000,
    data_sheet_bandwidth=2_400_000_000_000,
    cost=_cost(989, 2400, links=370, nic=47, switch=480, power=0.82),
)
# An H100 with NVLink of 400 GB/s in place of 900; DeepSeek-V3 (arXiv:2412.19437),
# section 3.2.2: 160 GB/s of it, 50 of InfiniBand.
_H800 = dataclasses.replace(
    _H100,
    name="h800",
    description="NVIDIA H800",
    cost=_cost(989, 3350, links=160, nic=47),
)
# NVIDIA H20 data sheet: 148 TFLOP/s dense, 96 GB with 4.0 TB/s, 78 multiprocessors;
# links and NICs of the H100.
_H20 = dataclasses.replace(
    _H100,
    name="h20",
    description="NVIDIA H20",
    memory=102_000_000_000,
    cores=78,
    l2_cache=60 << 20,
    data_sheet_bandwidth=4_000_000_000_000,
    cost=_cost(148, 4000, links=370, nic=47, switch=480),
)
# NVIDIA H200 data sheet: 989 TFLOP/s, 4.8 TB/s; links and NICs of the H100.
_H200 = dataclasses.replace(
    _H100,
    name="h200",
    description="NVIDIA H200",
    memory=150_000_000_000,
    l2_cache=60 << 20,
    data_sheet_bandwidth=4_800_000_000_000,
    cost=_cost(989, 4800, links=370, nic=47, switch=480),
)
# NVIDIA HGX B200 data sheet: 2.25 PFLOP/s dense, 8 TB/s; nccl#1807: rings of 18 links
# of 40.1 GB/s, 830 GB/s of an all-reduce by the switch; NICs of 400 Gb/s.
_B200 = GPU(
    name="b200",
    description="NVIDIA B200",
    memory=192_000_000_000,
    compute_capability=(10, 0),
    cores=148,
    l2_cache=126 << 20,
    shared_memory=227 << 10,
    clock=1.965,
    data_sheet_bandwidth=8_000_000_000_000,
    cost=_cost(2250, 8000, links=722, nic=47, switch=830, products=0.87),
)
# NVIDIA HGX B300 data sheet: 2.25 PFLOP/s dense, 288 GB, NICs of 800 Gb/s.
_B300 = dataclasses.replace(
    _B200,
    name="b300",
    description="NVIDIA B300",
    memory=288_000_000_000,
    compute_capability=(10, 3),
    cost=_cost(2250, 8000, links=722, nic=94, switch=830, products=0.93),
)
# NVIDIA GB200 NVL72 data sheet: 2.5 PFLOP/s dense and 186 GB a GPU, 72 GPUs on one
# NVLink domain, NICs of 400 Gb/s.
_GB200 = dataclasses.replace(
    _B200,
    name="gb200",
    description="NVIDIA GB200",
    cost=_cost(
        2500, 8000, links=722, nic=47, switch=830, host=200, node=72, products=0.80
    ),
)
# NVIDIA GB300 NVL72 data sheet: 2.5 PFLOP/s dense, 288 GB, NICs of 800 Gb/s.
_GB300 = dataclasses.replace(
    _B300,
    name="gb300",
    description="NVIDIA GB300",
    cost=_cost(
        2500, 8000, links=722, nic=94, switch=830, host=200, node=72, products=0.97
    ),
)

_LISTED = (
    *(_A100, _A100_40GB, _H20, _H800, _H100, _H100_500W, _H200),
    *(_B200, _B300, _GB200, _GB300),
)

GPUS = {gpu.name: gpu for gpu in _LISTED}
"""GPUs by name.

Shapes and peaks are the vendor's, links and NICs those of published nccl-tests. The
parts of them that training reaches were fitted to published steps of H100s and H200s,
see `benchmarks/validate_planner.py`; for other GPUs that of products is scaled as
libraries measured it, and the rest assumed to be the same.
"""


def find_gpu(gpu: str | GPU, *, memory: float | None = None, **costs: float) -> GPU:
    """Returns a GPU by name, with its memory or figures of its cost model replaced.

    Args:
      gpu: Name in `GPUS`, in letters of any case, or a GPU.
      memory: Device memory in bytes; None for that of the GPU.
      **costs: Fields of `CostModel`, such as `devices_per_node=4`.

    Raises:
      ValueError: If the name or a field is unknown, a figure is not in its range, such
        as a speed of 0, or `memory` is no GPU's.
    """
    if isinstance(gpu, str):
        if gpu.lower() not in GPUS:
            raise ValueError(
                f"The GPU '{gpu}' is unknown: use {', '.join(GPUS)}. For another GPU "
                "of NVIDIA name the nearest of these, and replace its memory and "
                "speeds: find_gpu(name, memory=..., flops=...), or --gpu-memory-gb, "
                "--tflops and the options beside them. XLA's compiler here has no "
                "other vendor's GPUs."
            )
        gpu = GPUS[gpu.lower()]
    known = [field.name for field in dataclasses.fields(CostModel)]
    wrong = [
        f"{name}={value}"
        for name, value in costs.items()
        if name not in known or not _is_possible(name, value)
    ]
    if wrong:
        raise ValueError(
            f"The cost model takes no {', '.join(wrong)}. Speeds are positive, "
            f"{', '.join(_MAY_BE_ZERO)} also 0 and finite, overlap_slowdown is below 1 "
            "and devices_per_node an integer; the figures are "
            f"{', '.join(known)}."
        )
    if memory is not None:
        if not 1e9 <= memory < 1e14:
            raise ValueError(
                f"memory={memory} is not the memory of a GPU in bytes: 80e9 is 80 GB."
            )
        gpu = dataclasses.replace(gpu, memory=int(memory))
    return dataclasses.replace(gpu, cost=dataclasses.replace(gpu.cost, **costs))


_MAY_BE_ZERO = (
    *("latency", "kernel_latency", "attention_half_length"),
    *("switch_bandwidth", "overlap_slowdown"),
)


def _is_possible(name: str, value: float | None) -> bool:
    """Returns whether a field of `CostModel` can have a value; NaN is none."""
    if value is None:
        return name in ("attention_forward", "attention_backward")
    if name == "overlap_slowdown":  # At 1 a kernel would wait for the collective.
        return 0 <= value < 1
    if name in _MAY_BE_ZERO:
        return 0 <= value < math.inf
    return value > 0 and not (name == "devices_per_node" and value % 1)
