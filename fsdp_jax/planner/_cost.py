"""Seconds per HLO instruction, on the cost model of a device."""

from __future__ import annotations

import json
import math
import re

from fsdp_jax.hlo._parse import Computation, Instruction, Module
from fsdp_jax.hlo._replica_groups import Collective
from fsdp_jax.planner._gpu import CostModel

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

FULL_PRECISION = {"f32": 0.5, "f64": 0.067}
"""Speed of wider matrix products relative to 16-bit: tf32, and fp64 tensor cores."""


def wire_bytes(collective: Collective, num_devices: int) -> float:
    """Returns the bytes that each device sends in a ring algorithm."""
    n = collective.group_size or num_devices
    sent = sum(shape.bytes for shape in collective.sent)
    received = sum(shape.bytes for shape in collective.received)
    around = (n - 1) / n
    return {
        "all-gather": received * around,
        "reduce-scatter": sent * around,
        "all-reduce": 2 * sent * around,
        "all-to-all": sent * around,
        # One side is a buffer for the worst case, the other the actual tokens.
        "ragged-all-to-all": min(sent, received) * around,
    }.get(collective.op, float(sent))


def wire_seconds(collective: Collective, num_devices: int, cost: CostModel) -> float:
    """Returns the seconds of a collective with the bandwidth to itself."""
    if crosses_nodes(collective, num_devices, cost):
        bandwidth = cost.network_bandwidth
    else:
        bandwidth = cost.link_bandwidth
    return cost.latency + wire_bytes(collective, num_devices) / bandwidth


def crosses_nodes(collective: Collective, num_devices: int, cost: CostModel) -> bool:
    """Returns whether a replica group spans several nodes."""
    groups = collective.groups or {tuple(range(num_devices))}
    return any(
        len({device // cost.devices_per_node for device in group}) > 1
        for group in groups
    )


def compute_seconds(
    module: Module, computation: Computation, one: Instruction, cost: CostModel
) -> float:
    """Returns the seconds of an instruction that is no collective.

    The larger of arithmetic time, where only matrix products count, and memory time of
    the bytes read and written. Called computations are not included, except for
    fusions.
    """
    if one.opcode in FREE:
        return 0.0
    flops, dtype = product_flops(module, computation, one)
    speed = cost.flops * FULL_PRECISION.get(dtype, 2.0 if dtype[:2] == "f8" else 1.0)
    moved = bytes_moved(module, computation, one)
    return max(flops / speed, moved / cost.memory_bandwidth)


def product_flops(
    module: Module, computation: Computation, one: Instruction
) -> tuple[float, str]:
    """Returns the FLOPs of an instruction's matrix products, and their dtype."""
    if one.opcode == "dot":
        return _dot(computation, one, one.attributes)
    if one.opcode == "fusion":
        within = module[one.calls[0]]
        found = [product_flops(module, within, i) for i in within.instructions]
        return max(
            ((sum(f for f, _ in found), dtype) for flops, dtype in found if flops),
            default=(0.0, "bf16"),
        )
    if one.opcode == "custom-call":
        if "matmul" in one.target or "gemm" in one.target:
            return _dot(computation, one, _gemm_dims(one))
        if "fmha" in one.target:
            return _attention(computation, one), "bf16"
    return 0.0, "bf16"


def _dot(computation: Computation, one: Instruction, dims: str) -> tuple[float, str]:
    left = computation.by_name[one.operands[0]].shapes[0]
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dims)
    contracted = [int(d) for d in found[1].split(",") if d] if found else []
    depth = math.prod(left.dims[d] for d in contracted)
    return 2.0 * one.shapes[0].num_elements * depth, left.dtype


def _gemm_dims(one: Instruction) -> str:
    """Formats the contracting dims of a library's matrix product as `dot` does."""
    found = re.search(r'"lhs_contracting_dimensions":(\[.*?\])', one.attributes)
    dims = json.loads(found[1]) if found else []
    return f"lhs_contracting_dims={{{','.join(dims)}}}"


def _attention(computation: Computation, one: Instruction) -> float:
    """Returns the FLOPs of cuDNN's attention: two products forward, five backward."""
    query, key = (computation.by_name[name].shapes[0] for name in one.operands[:2])
    batch, length, heads, width = query.dims
    products = 5 if "Backward" in one.target else 2
    causal = 0.5 if "CAUSAL" in one.attributes else 1.0
    return products * causal * 2.0 * batch * heads * length * key.dims[1] * width


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
