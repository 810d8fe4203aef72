"""FLOPs and bytes of HLO instructions."""

from __future__ import annotations

import dataclasses
import json
import math
import re

from fsdp_jax._scopes import FLASH_FORWARD, FLASH_KEY_GRADS, FLASH_QUERY_GRAD
from fsdp_jax.hlo._parse import Computation, Instruction, Module, Shape

FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "opt-barrier",
    "partition-id",
    "replica-id",
    "iota",
}
"""Opcodes that move no bytes or launch no kernel."""

VIEWS = ("bitcast", "reshape", "transpose", "copy", "convert")
"""Opcodes whose operand a fusion reads only as far as their result is read."""


def product_flops(
    module: Module, computation: Computation, one: Instruction
) -> tuple[float, str]:
    """Returns the FLOPs of an instruction's products, and their dtype."""
    if one.opcode == "dot":
        return _dot(computation, one, one.attributes)
    if one.opcode == "fusion":
        within = module[one.calls[0]]
        found = [product_flops(module, within, i) for i in within.instructions]
        # The dtype of the largest product stands for all of the fusion.
        return sum(flops for flops, _ in found), max(found, default=(0.0, "bf16"))[1]
    if one.opcode == "custom-call":
        if "matmul" in one.target or "gemm" in one.target:
            return _dot(computation, one, _gemm_dims(one))
        if "blockScaledDot" in one.target:
            return _block_scaled(computation, one)
        if "fmha" in one.target:
            return _attention(computation, one), "bf16"
        if flash := flash_operands(computation, one):
            return flash.flops, "bf16"
    return 0.0, "bf16"


def _dot(computation: Computation, one: Instruction, dims: str) -> tuple[float, str]:
    left = computation.by_name[one.operands[0]].shapes[0]
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dims)
    contracted = [int(d) for d in found[1].split(",") if d] if found else []
    depth = math.prod(left.dims[d] for d in contracted)
    return 2.0 * one.shapes[0].num_elements * depth, left.dtype


def _block_scaled(computation: Computation, one: Instruction) -> tuple[float, str]:
    """Returns the FLOPs of cuDNN's product in microscaling formats, and their dtype.

    Both operands, `[batch, rows, depth]`, are contracted along their last dim.
    """
    left = computation.by_name[one.operands[0]].shapes[0]
    return 2.0 * one.shapes[0].num_elements * left.dims[-1], left.dtype


def _gemm_dims(one: Instruction) -> str:
    """Formats the contracting dims of a library's matrix product as `dot` does."""
    found = re.search(r'"lhs_contracting_dimensions":(\[.*?\])', one.attributes)
    dims = json.loads(found[1]) if found else []
    return f"lhs_contracting_dims={{{','.join(dims)}}}"


def _attention(computation: Computation, one: Instruction) -> float:
    """Returns the FLOPs of cuDNN's attention: two products forward, five backward."""
    query, key, value = (
        computation.by_name[name].shapes[0] for name in one.operands[:3]
    )
    widths = key.dims[-1] + value.dims[-1]
    if "Backward" in one.target:
        # Scores and the gradients of queries and keys, of weights and values.
        widths = 3 * key.dims[-1] + 2 * value.dims[-1]
    causal = 0.5 if "CAUSAL" in one.attributes else 1.0
    batch, length, heads, _ = query.dims
    return causal * 2.0 * batch * heads * length * key.dims[1] * widths


@dataclasses.dataclass(frozen=True)
class FlashOperands:
    """Operands of a Pallas attention kernel of `bridge.models`.

    Attributes:
      name: Which of the three kernels it is.
      query: Shape of the queries, `[batch, seq, heads, head_dim]`.
      key: Shape of the keys.
      value: Shape of the values.
    """

    name: str
    query: Shape
    key: Shape
    value: Shape

    @property
    def is_forward(self) -> bool:
        """Whether it is the forward pass."""
        return self.name == FLASH_FORWARD

    @property
    def flops(self) -> float:
        """FLOPs of its products if all keys up to a query are seen."""
        products = {FLASH_FORWARD: (1, 1), FLASH_QUERY_GRAD: (2, 1)}
        by_key, by_value = products.get(self.name, (2, 2))
        widths = by_key * self.key.dims[-1] + by_value * self.value.dims[-1]
        batch, length, heads, _ = self.query.dims
        causal = 0.5 if length == self.key.dims[1] else 1.0
        return causal * 2.0 * batch * heads * length * self.key.dims[1] * widths


def flash_operands(computation: Computation, one: Instruction) -> FlashOperands | None:
    """Returns the operands of a Pallas attention kernel; None for anything else."""
    if one.opcode != "custom-call" or "triton" not in one.target:
        return None
    name = next((name for name in _FLASH_OPERANDS if name in one.attributes), None)
    if name is None:
        return None
    operands = (one.operands[at] for at in _FLASH_OPERANDS[name])
    shapes = (computation.by_name[operand].shapes[0] for operand in operands)
    return FlashOperands(name, *shapes)


_FLASH_OPERANDS = {
    FLASH_FORWARD: (0, 1, 2),
    FLASH_QUERY_GRAD: (3, 4, 5),
    FLASH_KEY_GRADS: (3, 4, 5),
}
"""Where queries, keys and values are among the operands of each kernel."""


def bytes_moved(module: Module, computation: Computation, one: Instruction) -> float:
    """Returns the bytes that an instruction reads from and writes to device memory.

    A slice counts its result only, an update in place its update only.
    """
    if one.opcode == "fusion":
        return _fusion_bytes(module[one.calls[0]])
    operands = [computation.by_name[name] for name in dict.fromkeys(one.operands)]
    if one.opcode in ("dynamic-slice", "slice", "gather"):
        return 2.0 * one.bytes
    if one.opcode == "dynamic-update-slice":
        return 2.0 * computation.by_name[one.operands[1]].bytes
    if one.opcode == "custom-call" and one.shapes:
        # Further results of a library's routine are workspace, not written results.
        written = one.shapes[0].bytes if len(one.shapes) > 1 else one.bytes
        return float(written + sum(operand.bytes for operand in operands))
    return float(one.bytes + sum(operand.bytes for operand in operands))


def _fusion_bytes(fused: Computation) -> float:
    read = sum(_read(fused, parameter) for parameter in fused.parameters.values())
    root = fused.root
    results = (
        [fused.by_name[name] for name in root.operands]
        if root.opcode == "tuple"
        else [root]
    )
    return float(read + sum(_written(fused, result) for result in results))


def _read(fused: Computation, value: Instruction) -> int:
    """Returns the bytes of a fusion's operand that its instructions read."""
    needed = 0.0
    for reader in fused.readers.get(value.name, []):
        if reader.opcode in ("dynamic-slice", "slice", "gather"):
            needed += reader.shapes[0].num_elements * _width(value)
        elif reader.opcode == "dynamic-update-slice":
            # The updated operand is overwritten in place, not read.
            if reader.operands[0] != value.name:
                needed += value.bytes
        elif reader.opcode in VIEWS:
            # From bytes of the view's dtype to bytes of the operand's.
            scale = _width(value) / max(_width(reader), 1e-9)
            needed += _read(fused, reader) * scale
            needed += value.bytes if _leaves(fused, reader) else 0
        else:
            needed += value.bytes
    return min(int(needed), value.bytes)


def _leaves(fused: Computation, one: Instruction) -> bool:
    """Returns whether `one` is a result of the fusion."""
    if one is fused.root:
        return True
    return fused.root.opcode == "tuple" and one.name in fused.root.operands


def _written(fused: Computation, result: Instruction) -> int:
    while result.opcode in VIEWS:
        result = fused.by_name[result.operands[0]]
    if result.opcode == "dynamic-update-slice":
        return fused.by_name[result.operands[1]].bytes
    return result.bytes


def _width(one: Instruction) -> float:
    elements = one.shapes[0].num_elements
    return one.shapes[0].bytes / elements if elements else 0.0
