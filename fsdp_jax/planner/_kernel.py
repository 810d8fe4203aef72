"""Kernels of a schedule: what each computes and moves, and its seconds on a GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

from fsdp_jax.hlo._parse import Computation, Instruction, Module
from fsdp_jax.planner._cost import FREE, bytes_moved, flash_operands, product_flops
from fsdp_jax.planner._gpu import CostModel

Kind = Literal[
    "matmul", "attention", "attention_backward", "flash", "flash_backward", "memory"
]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel, without the speed of any GPU.

    Attributes:
      kind: Limit of its speed: a matrix product, fused attention by cuDNN, that by the
        Pallas kernel of `bridge.models`, or memory.
      flops: FLOPs of its matrix products.
      dtype: Dtype of its operands, as HLO writes it.
      bytes: Bytes read and written.
      length: Keys of fused attention; 0 for other kernels.
      width: Width of a head of fused attention; 0 for other kernels.
      workspace: Bytes of memory that it needs beside its operands and results.
    """

    kind: Kind
    flops: float
    dtype: str
    bytes: float
    length: int = 0
    width: int = 0
    workspace: float = 0.0


def kernel_of(
    module: Module, computation: Computation, one: Instruction
) -> Kernel | None:
    """Returns the kernel of an instruction that is not a collective; None for none.

    Called computations are not included, except for fusions.
    """
    if one.opcode in FREE:
        return None
    flops, dtype = product_flops(module, computation, one)
    moved = bytes_moved(module, computation, one)
    if "fmha" in one.target:
        query, key = (computation.by_name[name].shapes[0] for name in one.operands[:2])
        length, width = key.dims[1], query.dims[-1]
        if "Backward" not in one.target:
            return Kernel("attention", flops, dtype, moved, length, width)
        # Gradients of queries are summed in float32 over blocks of keys, beside a sum
        # for each query of each head.
        needed = 4.0 * math.prod(query.dims[:-1]) * (width + 1)
        return Kernel("attention_backward", flops, dtype, moved, length, width, needed)
    if flash := flash_operands(computation, one):
        kind = "flash" if flash.is_forward else "flash_backward"
        length, width = flash.key.dims[1], flash.key.dims[-1]
        return Kernel(kind, flops, dtype, moved, length, width)
    return Kernel("matmul" if flops else "memory", flops, dtype, moved)


def workspace_bytes(kernels: Iterable[Kernel]) -> int:
    """Returns the largest workspace of any kernel: they run one after another."""
    return round(max((kernel.workspace for kernel in kernels), default=0.0))


def attention_names(kernels: Iterable[Kernel]) -> tuple[str, ...]:
    """Returns the names of the fused attention kernels among `kernels`."""
    kinds = {kernel.kind for kernel in kernels}
    return tuple(name for kind, name in _ATTENTION_NAMES.items() if kind in kinds)


_ATTENTION_NAMES = {
    "attention": "cuDNN's forward",
    "attention_backward": "cuDNN's backward",
    "flash": "flash forward",
    "flash_backward": "flash backward",
}


def kernel_seconds(kernel: Kernel, cost: CostModel) -> float:
    """Returns the seconds of a kernel: the longer of arithmetic and memory.

    Only matrix products count as arithmetic.
    """
    if not kernel.flops and not kernel.bytes:
        return 0.0
    moving = kernel.bytes / cost.memory_bandwidth
    return cost.kernel_latency + max(kernel.flops / _speed(kernel, cost), moving)


def _speed(kernel: Kernel, cost: CostModel) -> float:
    """Returns FLOP/s of a kernel's matrix products."""
    if kernel.kind == "attention":
        return _attention_speed(kernel, cost, cost.attention_forward)
    if kernel.kind == "attention_backward":
        return _attention_speed(kernel, cost, cost.attention_backward)
    if kernel.kind == "flash":
        return FLASH * _attention_speed(kernel, cost, cost.attention_forward)
    if kernel.kind == "flash_backward":
        return FLASH * _attention_speed(kernel, cost, cost.attention_backward)
    if kernel.dtype in _WIDE:
        return cost.flops * _WIDE[kernel.dtype]
    return cost.flops * (cost.float8_speed if kernel.dtype[:2] == "f8" else 1.0)


FLASH = 0.6
"""Speed of the Pallas attention kernel relative to cuDNN's: assumed, never measured.

Source: FlashAttention-3 (arXiv 2407.08608), figures 5 and 6: FlashAttention-2, whose
algorithm it has, beside cuDNN 9 on an H100.
"""

_WIDE = {"f32": 0.5, "f64": 0.067}
"""Speed of wider matrix products relative to 16-bit: tf32, and fp64 tensor cores."""


def _attention_speed(kernel: Kernel, cost: CostModel, fastest: float | None) -> float:
    # Short rows have few blocks of keys a block of queries, and narrow heads wait for
    # their exponentials.
    rows = kernel.length / (kernel.length + cost.attention_half_length)
    return (fastest or cost.flops) * rows * min(1.0, (kernel.width / 128) ** 0.5)
